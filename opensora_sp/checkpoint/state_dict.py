"""Compare the tensors on disk with a model: a full report, and conversions by name."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange, repeat
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
        config_keys: settings in which model and weights may then differ.
        changed: the tensors that replace those on disk; None if there are none.
        replaced: patterns of tensors that may differ in any way: the ones on disk are left out,
            and the model's keep their initialization.
    """

    config_keys: frozenset[str]
    changed: Callable[[Tensors, ConditionedModel], Tensors] | None = None
    replaced: tuple[str, ...] = ()


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


def _more_channels(tensors: Tensors, model: ConditionedModel) -> Tensors:
    """First and last projection for n times as many latent channels, as in Open-Sora 1.3.

    Each channel is repeated. The input's weights are divided by n, so that n equal groups of
    channels give the tokens that one gave.
    """
    volume, channels = math.prod(model.config.patch_size), model.config.in_channels
    first = tensors.get("x_embedder.proj.weight")
    if first is None or channels == first.shape[1] or channels % first.shape[1]:
        return {}

    before = first.shape[1]
    times = channels // before

    def widened(stored: Stored) -> Tensor:
        return repeat(stored.read(), "width c ... -> width (n c) ...", n=times) / times

    def repeated(stored: Stored) -> Tensor:
        pattern = "(v parts c) ... -> (v parts n c) ..."
        return repeat(stored.read(), pattern, v=volume, c=before, n=times)

    width, _, *patch = first.shape
    changed = {"x_embedder.proj.weight": Stored((width, channels, *patch), partial(widened, first))}
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        stored = tensors.get(name)
        if stored is None or stored.shape[0] % (volume * before):
            return {}
        shape = (stored.shape[0] * times, *stored.shape[1:])
        changed[name] = Stored(shape, partial(repeated, stored))
    return changed


CONVERSIONS = {
    "pos_embed": Conversion(
        frozenset({"input_size", "space_scale", "time_scale"}), _recomputed_tables
    ),
    "y_embedding": Conversion(frozenset({"model_max_length"}), _resized_text),
    "in_channels": Conversion(
        frozenset({"in_channels", "use_cond"}), _more_channels, replaced=("x_embedder_cond*",)
    ),
    # Of as many channels as the model has.
    "pred_sigma": Conversion(frozenset({"pred_sigma"}), _without_sigma),
    "temporal_blocks": Conversion(
        frozenset({"skip_temporal", "kernel_size", "use_spatial_rope"}),
        # Frequencies follow from the configuration.
        replaced=("temporal_blocks.*", "rope.freqs"),
    ),
}


def check_conversions(names: Iterable[str]) -> tuple[str, ...]:
    """The names in the order of ``CONVERSIONS``, each of which must be one of these."""
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in CONVERSIONS:
            raise ValueError(
                f"got conversion {name!r}; expected some of {list(CONVERSIONS)}; choose from these"
            )
    return tuple(name for name in CONVERSIONS if name in names)


@dataclass(frozen=True)
class Differences:
    """Differences between the tensors on disk and the tensors of a model.

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
        cls, on_disk: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tensor]
    ) -> Differences:
        shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        return cls(
            missing=tuple(name for name in shapes if name not in on_disk),
            unexpected=tuple(name for name in on_disk if name not in shapes),
            reshaped={
                name: f"{list(on_disk[name])}, not {list(shape)}"
                for name, shape in shapes.items()
                if name in on_disk and on_disk[name] != shape
            },
        )

    def matching(self, patterns: Collection[str], *, matches: bool = True) -> Differences:
        """Differences in names that match a pattern, or with ``matches=False`` the others."""

        def kept(name: str) -> bool:
            return matches == any(fnmatchcase(name, pattern) for pattern in patterns)

        return Differences(
            missing=tuple(filter(kept, self.missing)),
            unexpected=tuple(filter(kept, self.unexpected)),
            reshaped={name: text for name, text in self.reshaped.items() if kept(name)},
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
    source: Any, on_disk: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tensor]
) -> None:
    """Raise ValueError unless the tensors of ``wanted`` are on disk in their shapes, and no others.

    Args:
        source: of the tensors, for the message.
        on_disk: shapes by name.
    """
    differences = Differences.between(on_disk, wanted)
    if differences:
        raise ValueError(
            f"got weights of another model in {source} ({differences}); expected weights of the "
            "configured model; change the checkpoint or the model"
        )


def fitted(
    weights: Weights,
    model: ConditionedModel,
    *,
    convert: Collection[str] = (),
    strict: bool = True,
    allow_base: bool = False,
) -> Weights:
    """The weights for a model: converted on request, and checked name by name.

    Args:
        model: the bare model, which may be on the meta device.
        convert: names of ``CONVERSIONS`` to apply; one without anything to convert is logged.
        strict: refuse any difference. Otherwise tensors that differ are skipped, with a warning.
        allow_base: for a derived class also accept all weights of a class that it is derived from,
            and where a conversion replaces tensors, weights without them. What the model adds is
            not among them then, and keeps its initialization.

    Raises:
        ValueError: with all differences, or if nothing fits at all.
    """
    convert = check_conversions(convert)
    weights = _converted(weights, model, convert)
    weights, differences = _replaced(weights, model, convert, allow_base=allow_base)
    if not differences:
        return weights
    base = _base_of(weights, model, convert) if allow_base else None
    if base is not None and len(differences) == len(differences.missing):
        note = f"weights of {base}; initialized anew: {_listed(differences.missing)}"
        return replace(weights, notes=(*weights.notes, note))

    skipped = {*differences.unexpected, *differences.reshaped}
    if strict or len(skipped) == len(weights.tensors):
        raise ValueError(
            f"got weights of another model in {weights.path} ({differences}); expected weights of "
            f"{type(model).__name__} as configured; change the checkpoint or the config's model"
            f"{_conversion_hint(weights, model, len(differences))}"
        )

    logger.warning("weights: loading what fits of %s (%s)", weights.path, differences)
    return weights.only(weights.tensors.keys() - skipped)


def _replaced(
    weights: Weights, model: ConditionedModel, convert: Collection[str], *, allow_base: bool
) -> tuple[Weights, Differences]:
    """The weights without tensors that conversions replace, and the differences that remain.

    Unless ``allow_base``, every tensor of the model has to be among the weights.
    """
    differences = Differences.between(weights.shapes, model.state_dict())
    patterns = _patterns_of(convert)
    replaced = differences.matching(patterns)
    anew = (*replaced.missing, *replaced.reshaped)
    if not replaced or (anew and not allow_base):
        return weights, differences

    left_out = (*replaced.unexpected, *replaced.reshaped)
    weights = weights.only(weights.tensors.keys() - set(left_out))
    notes = [*weights.notes]
    if left_out:
        notes.append(f"conversion: left out: {_listed(left_out)}")
    if anew:
        notes.append(f"conversion: initialized anew: {_listed(anew)}")
    remaining = differences.matching(patterns, matches=False)
    return replace(weights, notes=tuple(notes)), remaining


def _patterns_of(convert: Collection[str]) -> list[str]:
    """Patterns of the names of tensors that conversions replace."""
    return [*chain.from_iterable(CONVERSIONS[name].replaced for name in convert)]


def _base_of(weights: Weights, model: ConditionedModel, convert: Collection[str]) -> str | None:
    """The base class of a model that has just these tensors.

    Tensors that conversions replace may be missing.
    """
    for cls in type(model).__mro__[1:]:
        # Only whole models are configured.
        config = getattr(cls, "Config", None)
        if config is None:
            continue
        settings = {
            field.name: getattr(model.config, field.name) for field in dataclasses.fields(config)
        }
        with torch.device("meta"):
            tensors = cls(config(**settings)).state_dict()
        differences = Differences.between(weights.shapes, tensors)
        if not differences.matching(_patterns_of(convert), matches=False):
            return cls.__name__
    return None


def _conversion_hint(weights: Weights, model: ConditionedModel, num_differences: int) -> str:
    """Names the conversions that would leave fewer differences."""
    helpful = []
    for name in CONVERSIONS:
        converted = _converted(weights, model, (name,))
        _, remaining = _replaced(converted, model, (name,), allow_base=True)
        if len(remaining) < num_differences:
            helpful.append(name)
    return f", or request the conversion: convert={helpful}" if helpful else ""


def _converted(weights: Weights, model: ConditionedModel, names: tuple[str, ...]) -> Weights:
    tensors, notes = dict(weights.tensors), list(weights.notes)
    for name in names:
        change = CONVERSIONS[name].changed
        changed = {} if change is None else change(tensors, model)
        if change is not None and not changed:
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
