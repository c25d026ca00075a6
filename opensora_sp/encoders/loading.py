"""Pretrained weights: found in a folder or on the Hugging Face hub, only read, and off the GPU
while idle if wished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

HASHED = (".bin", ".json", ".model", ".safetensors")
Dtype = Literal["fp32", "bf16", "fp16"]


class FrozenEncoder(nn.Module):
    """A network that is only used, never trained.

    Args:
        offload: keep the weights on the CPU and bring them to the device of ``to`` for each
            ``encode`` and ``decode`` only. Going back costs nothing: they have not changed, so the
            copy on the device is dropped.
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
        """Within this the weights are on the device of ``to``."""
        if not self.offload:
            yield
            return
        home = [
            (module, name, tensor)
            for module in self.modules()
            for name, tensor in [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]
        ]
        moved = {
            id(tensor): tensor.detach().to(self.device) for _, _, tensor in home
        }  # a shared one once
        try:
            for module, name, tensor in home:
                there = moved[id(tensor)]
                is_parameter = isinstance(tensor, nn.Parameter)
                setattr(
                    module,
                    name,
                    nn.Parameter(there, requires_grad=False) if is_parameter else there,
                )
            yield
        finally:
            for module, name, tensor in home:
                setattr(module, name, tensor)


def load_pretrained(cls: Any, source: str, key: str, **options: Any) -> Any:
    """``cls.from_pretrained``, where nothing may be missing.

    Args:
        cls: of diffusers or transformers.
        source: local folder, or name on the hub.
        key: what the config calls it, for errors.

    Raises:
        ValueError: if it cannot be found or loaded, or tensors are missing.
    """
    is_model = issubclass(cls, nn.Module)
    with explained(cls.__name__, source, key) as local_files_only:
        if not is_model:
            return cls.from_pretrained(source, local_files_only=local_files_only, **options)
        model, found = cls.from_pretrained(
            source, local_files_only=local_files_only, output_loading_info=True, **options
        )
        if found["missing_keys"]:
            raise ValueError(
                f"{len(found['missing_keys'])} tensors are missing, {found['missing_keys'][0]} is "
                "one"
            )
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
    """SHA-256 of the weights and configuration of a local folder, or of what the hub's cache has of
    a repository; None where neither is on this machine. Nothing is loaded; reading takes about a
    second for each GB.
    """
    folder = Path(source, subfolder or "")
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.utils import HFValidationError

        try:
            found = try_to_load_from_cache(source, str(Path(subfolder or "", "config.json")))
        except HFValidationError:  # a path, then, of a folder that is elsewhere
            found = None
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in HASHED and path.is_file():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


@contextmanager
def explained(what: str, source: str, key: str) -> Iterator[bool]:
    """Make one error, which names the local-folder way, of all that can go wrong in loading; yields
    whether only files of this machine can be used.
    """
    from safetensors import SafetensorError

    local = Path(source).is_dir() or not _hub_answers()
    try:
        yield local
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if Path(source).is_dir():
            reason = f"a folder that {what} cannot be loaded from ({_shortly(error)})"
        elif local:
            reason = "which is no folder here, and not in the hub's cache either, while the hub cannot be reached"
        else:
            reason = f"a name that {what} cannot be loaded by ({_shortly(error)})"
        raise ValueError(
            f"got {key}.from_pretrained {source!r}, {reason}; expected a local folder with the "
            "weights and their config.json, or a name on the hub and a network to fetch it; set "
            f"{key}.from_pretrained to a folder (`hf download NAME --local-dir FOLDER` makes one "
            "on a machine with a network)"
        ) from error


def saved_config(folder: str | Path, subfolder: str | None = None) -> dict[str, Any] | None:
    """The ``config.json`` of a local folder, if there is one."""
    described = Path(folder, subfolder or "", "config.json")
    return json.loads(described.read_text()) if described.is_file() else None


def _hub_answers() -> bool:
    """One quick question, since the libraries themselves try for a minute before they say that
    there is no network.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except (
        Exception
    ):  # whatever the HTTP library of the day raises, also where the hub is switched off
        return False
    return True


def _shortly(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."
