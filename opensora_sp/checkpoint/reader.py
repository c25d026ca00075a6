"""One way to open them all: safetensors and pickles, whole or in shards, as named tensors read when asked for.

What a file is, its first bytes say, not its name: ColossalAI's Booster writes files without an ending.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .paths import find_weights, shard_of, weight_file

logger = logging.getLogger(__name__)

# Versions of torch below which loading with weights_only=True can still run code from the file.
HOLES = {(2, 6): "CVE-2025-32434", (2, 10): "CVE-2026-24747"}
WRAPPERS = ("state_dict", "model", "module")
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile


@dataclass(frozen=True)
class Stored:
    """A tensor on disk. ``read`` maps it or loads it; copy the result before the file may change."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Weights:
    """Opened weights: where they are, in which format, the ``config.json`` with them, and what was unwrapped."""

    path: Path
    format: str
    config: dict[str, Any] | None
    tensors: dict[str, Stored]
    notes: tuple[str, ...] = ()

    def log(self) -> None:
        """Say what is read, and how."""
        logger.info("weights: %d tensors from %s (%s)", len(self.tensors), self.path, self.format)
        for note in self.notes:
            logger.info("weights: %s", note)


def open_weights(path: str | Path, *, ema: bool = False, allow_pickle: bool = False) -> Weights:
    """Open the weights that a path stands for; nothing but names and shapes is read yet.

    Args:
        path: see ``find_weights``. Of what a folder holds, safetensors are taken first.
        ema: take the averaged weights of a checkpoint or of a file that holds both.
        allow_pickle: also open pickled files (.pt, .pth, .bin), with ``weights_only=True``. Only for files from a
            source you trust: see ``HOLES``.

    Raises:
        ValueError: if there are none, they are pickled and that is not allowed, damaged, or not a state dict.
    """
    place = find_weights(path, ema=ema)
    file = weight_file(place)
    if file.name.endswith(".index.json"):
        weights = _open_shards(file, ema=ema, allow_pickle=allow_pickle)
    else:
        weights = _open_file(file, ema=ema, allow_pickle=allow_pickle)
    return replace(_without_prefix(weights), path=place, config=saved_config(place))


def saved_config(place: Path) -> dict[str, Any] | None:
    """``config.json`` of a folder of weights, or of the folder of a file, or of ``model`` beside ``ema``."""
    folders = [place if place.is_dir() else place.parent]
    if place.stem == "ema":
        folders.append(place.parent / "model")
    for file in (folder / "config.json" for folder in folders):
        if file.is_file():
            try:
                values = json.loads(file.read_text())
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"got {file}, which is not JSON ({error}); expected a configuration; correct it"
                ) from None
            if not isinstance(values, dict):
                raise ValueError(
                    f"got {file}, which is no JSON object; expected names and values; correct it"
                )
            return values
    return None


def _open_shards(index: Path, **options: bool) -> Weights:
    """All shards that an index names, as one."""
    places = shard_of(index)
    names = sorted(set(places.values()))
    shards = {name: _open_file(index.parent / name, **options) for name in names}
    lost = [name for name, shard in places.items() if name not in shards[shard].tensors]
    if lost:
        raise ValueError(
            f"got {index}, which has {lost[0]} in {places[lost[0]]}, where it is not ({len(lost)} such tensors); "
            "expected an index of these shards; download both again"
        )
    first = shards[names[0]]
    tensors = {name: shards[shard].tensors[name] for name, shard in places.items()}
    return replace(first, format=f"{len(names)} shards, {first.format}", tensors=tensors)


def _open_file(file: Path, *, ema: bool, allow_pickle: bool) -> Weights:
    with file.open("rb") as opened:
        head = opened.read(9)
    if head.startswith(b"version "):
        raise ValueError(
            f"got {file}, a Git LFS pointer; expected the file itself; run git lfs pull in its folder"
        )
    if head[8:] == b"{":
        return Weights(file, "safetensors", None, _open_safetensors(file))
    found = _unpickle(file, mmap=head.startswith(b"PK"), allow_pickle=allow_pickle)
    state, notes = _unwrap(file, found, ema=ema)
    tensors = {
        name: Stored(tuple(tensor.shape), partial(_same, tensor)) for name, tensor in state.items()
    }
    return Weights(file, "pickle", None, tensors, notes)


def _open_safetensors(file: Path) -> dict[str, Stored]:
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"got {file}, which is damaged ({error}); expected a whole safetensors file; copy or download it again"
        ) from None
    shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    return {name: Stored(shape, partial(opened.get_tensor, name)) for name, shape in shapes.items()}


def _unpickle(file: Path, *, mmap: bool, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise ValueError(
            f"got {file}, which is pickled, and a pickle can run code as it is read; expected safetensors; if you "
            "trust where it comes from, pass allow_pickle=True (--allow-pickle), or convert it once with "
            "opensora-sp convert"
        )
    _warn_of_holes(torch.__version__)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"got {file}, which holds more than tensors and plain values, or no pickle ({str(error).splitlines()[0]}); "
            "expected a state dict; nothing else is unpickled: save its state dict as safetensors where it was made"
        ) from None
    except (
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        AttributeError,
        IndexError,
    ) as error:  # as torch meets damage
        raise ValueError(
            f"got {file}, which cannot be read ({type(error).__name__}: {error}); expected weights saved by torch or "
            "safetensors; copy or download it again"
        ) from None


@cache
def _warn_of_holes(version: str) -> None:
    """Once per process."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    open_here = [
        f"{name} (closed in {'.'.join(map(str, fixed))})"
        for fixed, name in HOLES.items()
        if numbers < fixed
    ]
    if open_here:
        logger.warning(
            "unpickling with torch %s: weights_only=True alone does not protect from %s; read only files that you "
            "trust, and convert them to safetensors: opensora-sp convert",
            version,
            ", ".join(open_here),
        )


def _unwrap(file: Path, found: Any, *, ema: bool) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state dict in what was unpickled, and which keys led to it."""
    notes: list[str] = []
    order = ("ema", *WRAPPERS) if ema else (*WRAPPERS, "ema")
    while isinstance(found, Mapping) and not any(
        isinstance(value, Tensor) for value in found.values()
    ):
        inside = [key for key in order if isinstance(found.get(key), Mapping)]
        if not inside:
            break
        notes.append(f"took {inside[0]!r} of the keys {list(found)} in {file.name}")
        found = found[inside[0]]
    is_state = isinstance(found, Mapping) and found and all(isinstance(name, str) for name in found)
    strange = (
        [name for name, value in found.items() if not isinstance(value, Tensor)] if is_state else []
    )
    if not is_state or strange:
        kind = (
            f"{found[strange[0]]!r:.40} under {strange[0]!r}"
            if strange
            else f"{type(found).__name__} {found!r:.40}"
        )
        raise ValueError(
            f"got {file}, which holds {kind}; expected a state dict, by itself or under one of {list(order)}; save the "
            "model's state dict"
        )
    return dict(found), tuple(notes)


def _without_prefix(weights: Weights) -> Weights:
    """Names as the model has them, where a wrapper put the same prefix before all."""
    for prefix in PREFIXES:
        if weights.tensors and all(name.startswith(prefix) for name in weights.tensors):
            tensors = {
                name.removeprefix(prefix): stored for name, stored in weights.tensors.items()
            }
            notes = (*weights.notes, f"took {prefix!r} off the {len(tensors)} names")
            return _without_prefix(replace(weights, tensors=tensors, notes=notes))
    return weights


def _same(tensor: Tensor) -> Tensor:
    return tensor
