"""Pretrained weights from a folder or the Hugging Face hub, and offloading to the CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from opensora_sp.checkpoint import hub
from opensora_sp.checkpoint.hub import HubName
from opensora_sp.checkpoint.reader import PickledWeightsError, convert_command, open_weights
from opensora_sp.checkpoint.reader import saved_config as read_config

# Files next to the weights that a text encoder reads.
TOKENIZER_FILES = ("spiece.model", "tokenizer.json")
HASHED_SUFFIXES = (".bin", ".json", ".model", ".safetensors")
# Types of options, by which configs check them.
Positive = Annotated[int, Field(ge=1)]
Dtype = Literal["fp32", "bf16", "fp16"]
Offload = bool | Literal["layers"]


class FrozenEncoder(nn.Module):
    """A network that is never trained.

    The constructor of a subclass opens its files with ``open_files``, and builds itself on the meta
    device where these are None.

    Args:
        offload: keep the weights on the CPU, and copy them to the device of ``to`` for each
            ``encode`` and ``decode`` only. The copy is dropped afterwards. With "layers", each
            entry of the largest ``ModuleList`` is copied for its own call alone.
    """

    is_planned = False

    def __init__(self, *, offload: Offload) -> None:
        super().__init__()
        self.offload = False if self.is_planned else offload
        self.device = torch.device("meta" if self.is_planned else "cpu")

    @classmethod
    def planned(cls, **options: Any) -> Self:
        """The encoder of a config's options on the meta device. Weights are not looked at.

        Its sizes are read from the ``config.json`` of a local folder, or else are the release's.
        """
        encoder = cls.__new__(cls)
        encoder.is_planned = True
        encoder.__init__(**options)  # type: ignore[misc]
        return encoder

    def open_files(
        self, source: str, key: str, subfolder: str | None = None
    ) -> PretrainedFiles | None:
        """The files to load, see ``PretrainedFiles``; None for a planned encoder."""
        return None if self.is_planned else PretrainedFiles(source, key, subfolder)

    def to(self, device: torch.device | str) -> FrozenEncoder:  # type: ignore[override]
        self.device = torch.device(device)
        return self if self.offload else super().to(self.device)

    @property
    def streamed_layers(self) -> list[nn.Module]:
        """The layers that are copied one at a time with ``offload="layers"``."""
        # The blocks of a network are nearly all of its weights.
        lists = [module for module in self.modules() if isinstance(module, nn.ModuleList)]
        return list(max(lists, key=weight_bytes, default=[]))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which the weights are on the device of ``to``; weights of streamed layers
        are there while the layer is called.
        """
        with ExitStack() as stack:
            if self.offload:
                layers = self.streamed_layers if self.offload == "layers" else []
                streamed = {id(module) for layer in layers for module in layer.modules()}
                resident = [module for module in self.modules() if id(module) not in streamed]
                stack.enter_context(copied(resident, self.device))
                for layer in layers:
                    stack.enter_context(_copied_in_calls(layer, self.device))
            yield


def weight_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers; a shared tensor counts once."""
    tensors = (*module.parameters(), *module.buffers())
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.nbytes for tensor in distinct.values())


@contextmanager
def copied(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """A context in which the modules' own tensors are copies on a device."""
    originals: list[tuple[nn.Module, str, Tensor]] = []
    for module in modules:
        named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        originals += [(module, name, tensor) for name, tensor in named]

    # By identity, so that a shared tensor is copied once.
    copies = {id(tensor): tensor.detach().to(device) for _, _, tensor in originals}
    try:
        for module, name, tensor in originals:
            # Replaced by name: the modules keep no reference to the copy after the call.
            copy = copies[id(tensor)]
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, requires_grad=False)
            setattr(module, name, copy)
        del copies
        yield
    finally:
        for module, name, tensor in originals:
            setattr(module, name, tensor)


@contextmanager
def _copied_in_calls(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """A context in which each call of a layer has copies of its weights, until it returns."""
    call = ExitStack()

    def enter(*_: Any) -> None:
        call.enter_context(copied(layer.modules(), device))

    def leave(*_: Any) -> None:
        call.close()

    hooks = (
        layer.register_forward_pre_hook(enter),
        layer.register_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        call.close()
        for hook in hooks:
            hook.remove()


class PretrainedFiles:
    """The files of an encoder: a local folder, or a name on the hub, ``owner/name[@revision]``.

    Weights are read by ``open_weights`` alone. diffusers and transformers unpickle whatever files
    an index of shards names, also with ``use_safetensors=True``.

    Args:
        key: key of the encoder in the config, for errors.

    Raises:
        ValueError: if there is no such folder or name, or the hub cannot be reached.
    """

    def __init__(self, source: str, key: str, subfolder: str | None = None) -> None:
        self.source, self.key = source, key
        self.without_subfolder = f", and remove {key}.subfolder" if subfolder else ""
        kind = replace(
            hub.WEIGHTS,
            noun=f"{key}.from_pretrained",
            advice="convert them once: opensora-sp convert {name} {target} --allow-pickle, then "
            f"set {key}.from_pretrained to {{target}}{self.without_subfolder}",
        )
        self.folder = hub.local_path(source, subfolder or "", kind=kind, more=TOKENIZER_FILES)
        if not self.folder.is_dir():
            raise self._error(f"which is not on disk ({hub.describe_missing(self.folder)})")

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``.

        Raises:
            ValueError: if there is none, or it is no JSON object.
        """
        with self.explained("config.json"):
            config = read_config(self.folder)
            if config is None:
                raise ValueError("it has no config.json")
        return config

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, mapped from safetensors.

        Raises:
            ValueError: if there are none, or they are pickled or damaged.
        """
        with self.explained("weights"):
            weights = open_weights(self.folder)
            return {name: stored.read() for name, stored in weights.tensors.items()}

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn all errors of loading into one with what to do.

        Args:
            what: is loaded in the context.

        Raises:
            ValueError: for any error inside the context.
        """
        try:
            yield
        except PickledWeightsError:
            target = f"{self.folder}-safetensors"
            raise ValueError(
                f"got {self.key}.from_pretrained {self.source!r}, whose weights are pickled, and a "
                "pickle can run code as it is read; expected safetensors; convert them once: "
                f"{convert_command(self.folder)}, then set {self.key}.from_pretrained to {target}"
                f"{self.without_subfolder}"
            ) from None
        # Foreign files make the libraries raise anything: tokenizers raises Exception itself.
        except Exception as error:
            raise self._error(f"whose {what} cannot be loaded ({shortly(error)})") from error

    def _error(self, reason: str) -> ValueError:
        return ValueError(
            f"got {self.key}.from_pretrained {self.source!r}, {reason}; expected a folder with the "
            f"weights and their config.json, or a name on the hub; set {self.key}.from_pretrained "
            "to a folder (`hf download NAME --local-dir FOLDER` makes one on a machine with a "
            "network)"
        )


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Assign tensors to a model on the meta device; tensors of other names are not used.

    Raises:
        ValueError: if one is missing.
        RuntimeError: if one has another shape.
    """
    names = model.state_dict().keys()
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, {missing[0]} is one")
    model.load_state_dict({name: tensors[name] for name in names}, assign=True)


def load_strictly(
    model: nn.Module, tensors: Mapping[str, Tensor], files: PretrainedFiles, name: str
) -> None:
    """Assign an autoencoder's tensors, whose names and shapes must be as in ``model``.

    Raises:
        ValueError: if they are not.
    """
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"got weights of another autoencoder in {files.source} ({shortly(error)}); expected "
            f"weights of {name} as its config.json describes it; choose another "
            "vae.from_pretrained"
        ) from None


def weights_digest(source: str, subfolder: str | None = None) -> str | None:
    """SHA-256 of the weights and configuration in a local folder, or in the hub's cache.

    None if neither is on this machine. Reading takes about a second per GB.
    """
    folder = Path(source, subfolder or "")
    name = None if folder.is_dir() else HubName.of_missing(source)
    if name is not None:
        try:
            folder = hub.snapshot(name, (), is_online=False) / name.within(subfolder or "").path
        # Not in the cache, or the path of a folder on another machine.
        except (OSError, ValueError):
            return None
    if not folder.is_dir():
        return None

    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in HASHED_SUFFIXES and path.is_file():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def saved_config(folder: str | Path, subfolder: str | None = None) -> dict[str, Any] | None:
    """The ``config.json`` of a local folder; None if there is none."""
    path = Path(folder, subfolder or "")
    return read_config(path) if path.is_dir() else None


def shortly(error: Exception) -> str:
    """An error's text on one line, with at most 300 characters of it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."
