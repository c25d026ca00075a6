"""Pretrained weights from a folder or the Hugging Face hub, and offloading to the CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from opensora_sp.json_reader import read_json

HASHED_SUFFIXES = (".bin", ".json", ".model", ".safetensors")
Dtype = Literal["fp32", "bf16", "fp16"]


class FrozenEncoder(nn.Module):
    """A network that is never trained.

    Args:
        offload: keep the weights on the CPU, and copy them to the device of ``to`` for each
            ``encode`` and ``decode`` only. The copy is dropped afterwards.
    """

    def __init__(self, *, offload: bool) -> None:
        super().__init__()
        self.offload = offload
        self.device = torch.device("cpu")

    def to(self, device: torch.device | str) -> FrozenEncoder:  # type: ignore[override]
        self.device = torch.device(device)
        return self if self.offload else super().to(self.device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which the weights are on the device of ``to``."""
        if not self.offload:
            yield
            return

        on_cpu: list[tuple[nn.Module, str, Tensor]] = []
        for module in self.modules():
            named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            on_cpu += [(module, name, tensor) for name, tensor in named]

        # By identity, so that a shared tensor is copied once.
        copies = {id(tensor): tensor.detach().to(self.device) for _, _, tensor in on_cpu}
        try:
            for module, name, tensor in on_cpu:
                copy = copies[id(tensor)]
                if isinstance(tensor, nn.Parameter):
                    copy = nn.Parameter(copy, requires_grad=False)
                setattr(module, name, copy)
            yield
        finally:
            for module, name, tensor in on_cpu:
                setattr(module, name, tensor)


def load_pretrained(cls: Any, source: str, key: str, **options: Any) -> Any:
    """``cls.from_pretrained`` of diffusers or transformers; missing tensors are errors.

    Args:
        cls: model or tokenizer class.
        source: local folder, or name on the hub.
        key: key in the config, for errors.

    Raises:
        ValueError: if it cannot be found or loaded, or tensors are missing.
    """
    with explained(cls.__name__, source, key) as local_files_only:
        if not issubclass(cls, nn.Module):
            return cls.from_pretrained(source, local_files_only=local_files_only, **options)
        model, found = cls.from_pretrained(
            source, local_files_only=local_files_only, output_loading_info=True, **options
        )
        missing = found["missing_keys"]
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing, {missing[0]} is one")
    return model


def read_tensors(source: str, name: str, key: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file of a local folder or of a repository on the hub.

    Raises:
        ValueError: if there is none, or it is damaged.
    """
    from safetensors.torch import load_file

    path = find_file(source, name, key)
    with explained(name, source, key):
        return load_file(path)


def find_file(source: str, name: str, key: str) -> Path:
    """A file of a local folder or of a repository on the hub.

    Raises:
        ValueError: if there is none.
    """
    with explained(name, source, key) as local_files_only:
        if Path(source).is_dir():
            if not Path(source, name).is_file():
                raise ValueError(f"it has no {name}")
            return Path(source, name)

        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(source, name, local_files_only=local_files_only))


def weights_digest(source: str, subfolder: str | None = None) -> str | None:
    """SHA-256 of the weights and configuration in a local folder, or in the hub's cache.

    None if neither is on this machine. Reading takes about a second per GB.
    """
    folder = Path(source, subfolder or "")
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.utils import HFValidationError

        try:
            found = try_to_load_from_cache(source, str(Path(subfolder or "", "config.json")))
        except HFValidationError:
            found = None  # the path of a folder on another machine
        if not isinstance(found, str):
            return None
        folder = Path(found).parent

    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in HASHED_SUFFIXES and path.is_file():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


@contextmanager
def explained(what: str, source: str, key: str) -> Iterator[bool]:
    """Turn all errors of loading into one, which explains local folders.

    Yields:
        Whether only local files can be used.

    Raises:
        ValueError: for any error inside the context.
    """
    from safetensors import SafetensorError

    local = Path(source).is_dir() or not _hub_answers()

    try:
        yield local
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if Path(source).is_dir():
            reason = f"a folder that {what} cannot be loaded from ({shortly(error)})"
        elif local:
            reason = (
                "which is no folder here, and not in the hub's cache either, while the hub cannot "
                "be reached"
            )
        else:
            reason = f"a name that {what} cannot be loaded by ({shortly(error)})"

        raise ValueError(
            f"got {key}.from_pretrained {source!r}, {reason}; expected a local folder with the "
            "weights and their config.json, or a name on the hub and a network to fetch it; set "
            f"{key}.from_pretrained to a folder (`hf download NAME --local-dir FOLDER` makes one "
            "on a machine with a network)"
        ) from error


def saved_config(folder: str | Path, subfolder: str | None = None) -> dict[str, Any] | None:
    """The ``config.json`` of a local folder; None if there is none."""
    path = Path(folder, subfolder or "", "config.json")
    return read_json(path) if path.is_file() else None


def _hub_answers() -> bool:
    """Whether the hub can be reached; the libraries themselves try for a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    # Errors depend on the HTTP library; offline mode raises as well.
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:
        return False
    return True


def shortly(error: Exception) -> str:
    """An error's text on one line, with at most 300 characters of it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."
