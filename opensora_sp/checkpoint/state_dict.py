"""Compare the tensors on disk with those of a model: a full report, and conversions by name."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor

from .reader import Stored, Weights

if TYPE_CHECKING:
    from opensora_sp.models.base import ConditionedModel

logger = logging.getLogger(__name__)
# Names, or patterns of names, of each kind of difference that a report shows.
MAX_SHOWN = 12
TEXT = "y_embedder.y_embedding"
Tensors = dict[str, Stored]


@dataclass(frozen=True)
class Conversion:
    """A change of tensors on the way from disk into a model, made on request.

    Args:
        config_keys: settings that may then differ from those of the weights.
        changed: the tensors that replace those on disk.
    """

    config_keys: frozenset[str]
    changed: Callable[[Tensors, ConditionedModel], Tensors]


def _recomputed_tables(tensors: Tensors, model: ConditionedModel) -> Tensors:
    """STDiT's position tables, computed for the configured sizes and scales."""
    tables = model.position_tables()
    return {
        name: Stored(tuple(table.shape), partial(table.clone)) for name, table in tables.items()
    }


def _resized_text(tensors: Tensors, model: ConditionedModel) -> Tensors:
    """The null caption ``[L, Cy]``: cut, or its last token repeated, as in Open-Sora 1.1."""
    length = model.config.model_max_length
    if TEXT not in tensors or tensors[TEXT].shape[0] == length:
        return {}

    old_length, *rest = tensors[TEXT].shape
    index = torch.arange(length).clamp(max=old_length - 1)
    return {TEXT: Stored((length, *rest), lambda: tensors[TEXT].read()[index])}


def _without_sigma(tensors: Tensors, model: ConditionedModel) -> Tensors:
    """The last projection ``[V * 2C, ...]`` without the channels of the variance."""
    volume, channels = math.prod(model.config.patch_size), model.config.in_channels
    if model.config.pred_sigma:
        return {}

    def first_half(stored: Stored) -> Tensor:
        halves = rearrange(stored.read(), "(v two c) ... -> two (v c) ...", two=2, c=channels)
        return halves[0].clone()

    changed = {}
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        stored = tensors.get(name)
        if stored is None or stored.shape[0] != 2 * volume * channels:
            return {}
        changed[name] = Stored((volume * channels, *stored.shape[1:]), partial(first_half, stored))
    return changed


CONVERSIONS = {
    "pos_embed": Conversion(
        frozenset({"input_size", "space_scale", "time_scale"}), _recomputed_tables
    ),
    "y_embedding": Conversion(frozenset({"model_max_length"}), _resized_text),
    "pred_sigma": Conversion(frozenset({"pred_sigma"}), _without_sigma),
}


def check_conversions(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each of which must be one of ``CONVERSIONS``."""
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in CONVERSIONS:
            raise ValueError(
                f"got conversion {name!r}; expected some of {list(CONVERSIONS)}; choose from these"
            )
    return names


@dataclass(frozen=True)
class Differences:
    """Between the tensors on disk and those of a model.

    Args:
        missing: names of the model only.
        unexpected: names on disk only.
        reshaped: "[2, 3], not [2, 4]" by name, for tensors of another shape.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: dict[str, str]

    @classmethod
    def between(
        cls, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tensor]
    ) -> Differences:
        shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        return cls(
            missing=tuple(name for name in shapes if name not in found),
            unexpected=tuple(name for name in found if name not in shapes),
            reshaped={
                name: f"{list(found[name])}, not {list(shape)}"
                for name, shape in shapes.items()
                if name in found and found[name] != shape
            },
        )

    def __len__(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.reshaped)

    def __str__(self) -> str:
        """All of them; the same difference in several blocks is listed once."""
        kinds = []
        if self.missing:
            kinds.append(f"missing {_listed(self.missing)}")
        if self.unexpected:
            kinds.append(f"unexpected {_listed(self.unexpected)}")
        if self.reshaped:
            kinds.append(f"of another shape {_listed(self.reshaped, self.reshaped)}")
        return f"{len(self)} differences: {'; '.join(kinds)}"


def check_names(
    source: Any, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tensor]
) -> None:
    """Raise ValueError unless the tensors of ``wanted`` are found in their shapes, and no others.

    Args:
        source: of the tensors, for the message.
        found: shapes by name.
    """
    differences = Differences.between(found, wanted)
    if differences:
        raise ValueError(
            f"got weights of another model in {source} ({differences}); expected those of the "
            "configured model; change the checkpoint or the model"
        )


def fitted(
    weights: Weights,
    model: ConditionedModel,
    *,
    convert: Collection[str] = (),
    strict: bool = True,
    of_base: bool = False,
) -> Weights:
    """The weights for a model: converted on request, and checked name by name.

    Args:
        weights: opened weights.
        model: the bare model, which may be on the meta device.
        convert: names of ``CONVERSIONS`` to apply; one without anything to convert is logged.
        strict: refuse any difference. Otherwise tensors that differ are skipped, with a warning.
        of_base: for a derived class also accept all weights of a class that it is derived from.
            What it adds is not among them then, and keeps its initialization.

    Raises:
        ValueError: with all differences, or if nothing fits at all.
    """
    weights = _converted(weights, model, check_conversions(convert))
    differences = Differences.between(weights.shapes, model.state_dict())
    if not differences:
        return weights
    base = _base_of(weights, model) if of_base else None
    if base is not None and len(differences) == len(differences.missing):
        note = f"those of {base}; initialized anew: {_listed(differences.missing)}"
        return replace(weights, notes=(*weights.notes, note))

    skipped = {*differences.unexpected, *differences.reshaped}
    if strict or len(skipped) == len(weights.tensors):
        raise ValueError(
            f"got weights of another model in {weights.path} ({differences}); expected those of "
            f"{type(model).__name__} as configured; change the checkpoint or the config's model"
            f"{_conversion_hint(weights, model, len(differences))}"
        )

    logger.warning("weights: loading what fits of %s (%s)", weights.path, differences)
    return weights.only(weights.tensors.keys() - skipped)


def _base_of(weights: Weights, model: ConditionedModel) -> str | None:
    """The class, of those that a model's is derived from, that has just these tensors."""
    for cls in type(model).__mro__[1:]:
        # Only whole models are configured.
        config = getattr(cls, "Config", None)
        if config is None:
            continue
        settings = {one.name: getattr(model.config, one.name) for one in dataclasses.fields(config)}
        with torch.device("meta"):
            tensors = cls(config(**settings)).state_dict()
        if not Differences.between(weights.shapes, tensors):
            return cls.__name__
    return None


def _conversion_hint(weights: Weights, model: ConditionedModel, num_differences: int) -> str:
    """Names the conversions that would leave fewer differences."""
    helpful = []
    for name in CONVERSIONS:
        shapes = _converted(weights, model, (name,)).shapes
        if len(Differences.between(shapes, model.state_dict())) < num_differences:
            helpful.append(name)
    return f", or request the conversion: convert={helpful}" if helpful else ""


def _converted(weights: Weights, model: ConditionedModel, names: tuple[str, ...]) -> Weights:
    tensors, notes = dict(weights.tensors), list(weights.notes)
    for name in names:
        changed = CONVERSIONS[name].changed(tensors, model)
        if not changed:
            notes.append(f"conversion {name}: nothing to convert")

        for tensor, stored in changed.items():
            before = list(tensors[tensor].shape) if tensor in tensors else "nothing"
            notes.append(f"conversion {name}: {tensor} from {before} to {list(stored.shape)}")
        # A new dict: a conversion reads the old one later.
        tensors = {**tensors, **changed}
    return replace(weights, tensors=tensors, notes=tuple(notes))


def _listed(names: Iterable[str], shapes: Mapping[str, str] | None = None) -> str:
    """Names with their shapes; those that differ in a block's number only are one pattern."""
    patterns: dict[str, list[str]] = {}
    for name in names:
        shape = f" {shapes[name]}" if shapes is not None else ""
        pattern = re.sub(r"\.\d+\.", ".*.", name) + shape
        patterns.setdefault(pattern, []).append(name + shape)

    lines = []
    for pattern, matches in patterns.items():
        several = len(matches) > 1
        lines.append(f"{pattern} ({len(matches)} times)" if several else matches[0])

    more = f", and {len(lines) - MAX_SHOWN} more kinds of names" if len(lines) > MAX_SHOWN else ""
    return ", ".join(lines[:MAX_SHOWN]) + more
