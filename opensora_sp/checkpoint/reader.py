"""Reader of weights: safetensors and pickles, whole or in shards; tensors are read on demand.

The first bytes of a file decide its format, not its name: ColossalAI's Booster writes files without
an ending.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.torch_version import TorchVersion

from opensora_sp.json_reader import read_json

from .paths import find_weights, weight_file
from .shard_index import ShardIndex, is_index
from .tensor_file import is_safetensors

logger = logging.getLogger(__name__)

# Versions of torch below which loading with weights_only=True can still run code from the file.
VULNERABILITIES = {"2.6": "CVE-2025-32434", "2.10": "CVE-2026-24747"}
WRAPPERS = ("state_dict", "model", "module")
# Of DistributedDataParallel and torch.compile.
PREFIXES = ("module.", "_orig_mod.")
# What torch.load raises for a damaged file.
DAMAGE = (RuntimeError, EOFError, ValueError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True)
class Stored:
    """A tensor on disk. ``read`` maps or loads it; copy the result before the file may change."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Weights:
    """Opened weights.

    Args:
        path: of the file or folder.
        format: for the log, such as "3 shards, safetensors".
        config: ``config.json`` with them, if there is one.
        tensors: by name, none of them read yet.
        notes: what was unwrapped or converted, for the log.
        metadata: of the header of a safetensors file, or of an index.
    """

    path: Path
    format: str
    config: dict[str, Any] | None
    tensors: dict[str, Stored]
    notes: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.tensors.items()}

    def only(self, names: Collection[str]) -> Weights:
        """Those of these names."""
        kept = {name: stored for name, stored in self.tensors.items() if name in names}
        return replace(self, tensors=kept)

    def log(self) -> None:
        """Log what is read, and how."""
        logger.info("weights: %d tensors from %s (%s)", len(self.tensors), self.path, self.format)
        for note in self.notes:
            logger.info("weights: %s", note)


def open_weights(path: str | Path, *, ema: bool = False, allow_pickle: bool = False) -> Weights:
    """Open the weights that a path resolves to. Only names and shapes are read.

    Args:
        path: see ``find_weights``. Safetensors are preferred to pickles.
        ema: open the EMA weights of a checkpoint, or of a file that holds both.
        allow_pickle: also open pickled files (.pt, .pth, .bin), with ``weights_only=True``. Only
            for files from a source you trust: see ``VULNERABILITIES``.

    Raises:
        ValueError: if there are none, they are pickled and that is not allowed, damaged, or not a
            state dict.
    """
    path = find_weights(path, ema=ema)
    file = weight_file(path)
    if is_index(file):
        weights = _open_shards(file, ema=ema, allow_pickle=allow_pickle)
    else:
        weights = _open_file(file, ema=ema, allow_pickle=allow_pickle)

    return replace(_without_prefix(weights), path=path, config=saved_config(path))


def saved_config(path: Path) -> dict[str, Any] | None:
    """``config.json`` of a folder, of the folder of a file, or of ``model`` beside ``ema``.

    Raises:
        ValueError: if it is not a JSON object.
    """
    folders = [path if path.is_dir() else path.parent]
    if path.stem == "ema":
        folders.append(path.parent / "model")

    files = [folder / "config.json" for folder in folders]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None

    values = read_json(file)
    if not isinstance(values, dict):
        raise ValueError(
            f"got {file}, which is no JSON object; expected names and values; correct it"
        )
    return values


def _open_shards(path: Path, **options: bool) -> Weights:
    """All shards of an index, as one."""
    index = ShardIndex.read(path)
    index.check_complete()
    shards = {file.name: _open_file(file, **options) for file in index.files}

    absent = [name for name, file in index.weight_map.items() if name not in shards[file].tensors]
    if absent:
        raise ValueError(
            f"got {path}, which has {absent[0]} in {index.weight_map[absent[0]]}, where it is not "
            f"({len(absent)} such tensors); expected an index of these shards; download both again"
        )

    first = next(iter(shards.values()))
    return replace(
        first,
        format=f"{len(shards)} shards, {first.format}",
        tensors={name: shards[file].tensors[name] for name, file in index.weight_map.items()},
        metadata=index.metadata,
    )


def _open_file(file: Path, *, ema: bool, allow_pickle: bool) -> Weights:
    if is_safetensors(file):
        return _open_safetensors(file)

    with file.open("rb") as opened:
        head = opened.read(8)
    if head == b"version ":
        raise ValueError(
            f"got {file}, a Git LFS pointer; expected the file itself; run git lfs pull in its "
            "folder"
        )

    content = _unpickle(file, mmap=head.startswith(b"PK"), allow_pickle=allow_pickle)
    state, notes = _unwrap(file, content, ema=ema)
    tensors = {
        name: Stored(tuple(tensor.shape), partial(_identity, tensor))
        for name, tensor in state.items()
    }
    return Weights(file, "pickle", None, tensors, notes)


def _open_safetensors(file: Path) -> Weights:
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"got {file}, which is damaged ({error}); expected a whole safetensors file; copy or "
            "download it again"
        ) from None

    tensors = {}
    for name in opened.keys():
        shape = tuple(opened.get_slice(name).get_shape())
        tensors[name] = Stored(shape, partial(opened.get_tensor, name))
    return Weights(file, "safetensors", None, tensors, metadata=opened.metadata() or {})


def _unpickle(file: Path, *, mmap: bool, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise ValueError(
            f"got {file}, which is pickled, and a pickle can run code as it is read; expected "
            "safetensors; if you trust where it comes from, pass allow_pickle=True "
            "(--allow-pickle), or convert it once with opensora-sp convert"
        )

    _warn_of_vulnerabilities(torch.__version__)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"got {file}, which holds more than tensors and plain values, or no pickle ({reason}); "
            "expected a state dict; nothing else is unpickled: save its state dict as safetensors "
            "where it was made"
        ) from None
    except DAMAGE as error:
        raise ValueError(
            f"got {file}, which cannot be read ({type(error).__name__}: {error}); expected weights "
            "saved by torch or safetensors; copy or download it again"
        ) from None


@cache
def _warn_of_vulnerabilities(version: str) -> None:
    """Warn, once per process, of vulnerabilities that this version of torch still has."""
    open_here = [
        f"{name} (closed in {fixed})"
        for fixed, name in VULNERABILITIES.items()
        if TorchVersion(version) < fixed
    ]
    if open_here:
        logger.warning(
            "unpickling with torch %s: weights_only=True alone does not protect from %s; read only "
            "files that you trust, and convert them to safetensors: opensora-sp convert",
            version,
            ", ".join(open_here),
        )


def _unwrap(file: Path, content: Any, *, ema: bool) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state dict in what was unpickled, and notes on the keys that led to it."""
    notes: list[str] = []
    order = ("ema", *WRAPPERS) if ema else (*WRAPPERS, "ema")
    while isinstance(content, Mapping) and not _holds_tensors(content):
        key = next((key for key in order if isinstance(content.get(key), Mapping)), None)
        if key is None:
            break
        notes.append(f"took {key!r} of the keys {list(content)} in {file.name}")
        content = content[key]

    problem = _not_a_state_dict(content)
    if problem is not None:
        raise ValueError(
            f"got {file}, which holds {problem}; expected a state dict, by itself or under one of "
            f"{list(order)}; save the model's state dict"
        )
    return dict(content), tuple(notes)


def _holds_tensors(mapping: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in mapping.values())


def _not_a_state_dict(content: Any) -> str | None:
    """Why an object is not a state dict; None if it is one."""
    is_mapping = isinstance(content, Mapping) and all(isinstance(name, str) for name in content)
    if not is_mapping or not content:
        return f"{type(content).__name__} {content!r:.40}"

    others = (name for name, value in content.items() if not isinstance(value, Tensor))
    name = next(others, None)
    return None if name is None else f"{content[name]!r:.40} under {name!r}"


def _without_prefix(weights: Weights) -> Weights:
    """Remove a prefix that a wrapper put before all names."""
    for prefix in PREFIXES:
        if weights.tensors and all(name.startswith(prefix) for name in weights.tensors):
            tensors = {
                name.removeprefix(prefix): stored for name, stored in weights.tensors.items()
            }
            notes = (*weights.notes, f"took {prefix!r} off the {len(tensors)} names")
            return _without_prefix(replace(weights, tensors=tensors, notes=notes))
    return weights


def _identity(tensor: Tensor) -> Tensor:
    return tensor
