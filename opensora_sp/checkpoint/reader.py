"""Reader of weights: safetensors and pickles, whole or in shards; tensors are read on demand.

All weights from outside are read here, of models and encoders, in training, sampling, feature
building and conversion. The first bytes of a file decide its format, not its name: ColossalAI's
Booster writes files without an ending.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from opensora_sp.common.files import read_json

from .paths import find_weights, weight_file
from .pickle_file import open_pickle, other_content
from .tensor_file import ShardIndex, is_index, is_safetensors

logger = logging.getLogger(__name__)

# Of DistributedDataParallel and torch.compile.
PREFIXES = ("module.", "_orig_mod.")


class PickledWeightsError(ValueError):
    """Weights are pickled, and that is not allowed."""


@dataclass(frozen=True)
class Stored:
    """A tensor on disk. ``read`` maps or loads it; copy the result before the file may change."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Weights:
    """Opened weights.

    Args:
        format: for the log, such as "3 shards, safetensors".
        config: ``config.json`` with them, if there is one.
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
        """The tensors of these names."""
        kept = {name: stored for name, stored in self.tensors.items() if name in names}
        return replace(self, tensors=kept)

    def log(self) -> None:
        """Log the source of the weights, and how they are read."""
        logger.info("weights: %d tensors from %s (%s)", len(self.tensors), self.path, self.format)
        for note in self.notes:
            logger.info("weights: %s", note)


def open_weights(path: str | Path, *, ema: bool = False, allow_pickle: bool = False) -> Weights:
    """Open the weights that a path resolves to. Only names and shapes are read.

    Args:
        path: see ``find_weights``. Safetensors are preferred to pickles.
        ema: open the EMA weights of a checkpoint, or of a file that holds both.
        allow_pickle: also open pickled files (.pt, .pth, .bin), of which no code is run, see
            ``pickle_file``.

    Raises:
        ValueError: if there are none, they are pickled and that is not allowed, damaged, or not a
            state dict.
    """
    path = find_weights(path, ema=ema, allow_pickle=allow_pickle)
    file = weight_file(path)
    try:
        open_file = _open_shards if is_index(file) else _open_file
        weights = open_file(file, ema=ema, allow_pickle=allow_pickle)
    except PickledWeightsError as error:
        name = "" if saved_config(path) else " --model NAME"
        raise PickledWeightsError(
            f"got {error}, which is pickled, and a pickle can run code as it is read; expected "
            f"safetensors; convert it once: {convert_command(path)}{name}, or pass "
            "allow_pickle=True (--allow-pickle)"
        ) from None

    return replace(_without_prefix(weights), path=path, config=saved_config(path))


def convert_command(source: Path) -> str:
    """The command that converts pickled weights to a folder next to them."""
    target = f"{source.with_suffix('') if source.is_file() else source}-safetensors"
    return shlex.join(["opensora-sp", "convert", str(source), target, "--allow-pickle"])


def saved_config(path: Path) -> dict[str, Any] | None:
    """``config.json`` of a folder, of the folder of a file, or of ``model`` next to ``ema``.

    Raises:
        ValueError: if it is not a JSON object.
    """
    folders = [path if path.is_dir() else path.parent]
    if path.stem == "ema":
        # Open-Sora 1.x writes ema.pt next to a folder model, which alone has the config.
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

    # All shards are of one format: one program has written them.
    first = next(iter(shards.values()))
    return replace(
        first,
        format=f"{len(shards)} shards, {first.format}",
        tensors={name: shards[file].tensors[name] for name, file in index.weight_map.items()},
        metadata=index.metadata,
    )


def _open_file(file: Path, *, ema: bool, allow_pickle: bool) -> Weights:
    try:
        if is_safetensors(file):
            return _open_safetensors(file)
        other = other_content(file)
    except OSError as error:
        raise ValueError(
            f"got {file}, which cannot be read ({error.strerror or error}); expected a file of "
            "weights; check the path, the disk and the permissions"
        ) from None

    if other is not None:
        raise ValueError(
            f"got {file}, which is {other}; expected weights: safetensors, or an archive of "
            "torch.save; check the path, or copy or download it again"
        )
    if not allow_pickle:
        raise PickledWeightsError(file)

    tensors, notes = open_pickle(file, ema=ema)
    opened = {
        name: Stored(tensor.shape, partial(tensor.view, tensor.dtype))
        for name, tensor in tensors.items()
    }
    return Weights(file, "pickle", None, opened, notes)


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


def _without_prefix(weights: Weights) -> Weights:
    """Remove a prefix that a wrapper put before all names."""
    for prefix in PREFIXES:
        if weights.tensors and all(name.startswith(prefix) for name in weights.tensors):
            tensors = {name.removeprefix(prefix): x for name, x in weights.tensors.items()}
            notes = (*weights.notes, f"took {prefix!r} off the {len(tensors)} names")
            return _without_prefix(replace(weights, tensors=tensors, notes=notes))
    return weights
