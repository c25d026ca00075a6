"""Do these tensors fit that model: a full report, and the conversions that may be asked for by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from opensora_sp.models.base import ConditionedModel

from .reader import Stored, Weights, logger

SHOWN = 12  # names, or kinds of names, of each sort in a report
TEXT = "y_embedder.y_embedding"
Tensors = dict[str, Stored]


@dataclass(frozen=True)
class Conversion:
    """What is changed on the way from disk into a model, where it is asked for."""

    config_keys: frozenset[str]
    """What of the configuration may then differ from that of the weights."""
    changed: Callable[[Tensors, ConditionedModel], Tensors]
    """The tensors that take the place of those on disk."""


def _recomputed_tables(tensors: Tensors, model: ConditionedModel) -> Tensors:
    """STDiT's position tables, computed for the configured sizes and scales."""
    tables = model.position_tables()
    return {
        name: Stored(tuple(table.shape), partial(table.clone)) for name, table in tables.items()
    }


def _resized_text(tensors: Tensors, model: ConditionedModel) -> Tensors:
    """The null caption ``[L, Cy]``: the first tokens, or the last one repeated, as Open-Sora 1.1 and later do."""
    wanted = model.config.model_max_length
    if TEXT not in tensors or tensors[TEXT].shape[0] == wanted:
        return {}
    length, *rest = tensors[TEXT].shape
    taken = torch.arange(wanted).clamp(max=length - 1)
    return {TEXT: Stored((wanted, *rest), lambda: tensors[TEXT].read()[taken])}


def _without_sigma(tensors: Tensors, model: ConditionedModel) -> Tensors:
    """The last projection ``[V * 2C, ...]`` without the second half of each patch position's channels."""
    volume, channels = math.prod(model.config.patch_size), model.config.in_channels
    names = ("final_layer.linear.weight", "final_layer.linear.bias")
    if model.config.pred_sigma or any(
        n not in tensors or tensors[n].shape[0] != 2 * volume * channels for n in names
    ):
        return {}

    def kept(stored: Stored) -> Tensor:
        halves = rearrange(stored.read(), "(v two c) ... -> two (v c) ...", two=2, c=channels)
        return halves[0].clone()

    return {
        n: Stored((volume * channels, *tensors[n].shape[1:]), partial(kept, tensors[n]))
        for n in names
    }


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
    """Between the tensors on disk and those of a model: names only here, only there, and of other shapes."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]
    shapes: dict[str, str]  # of the reshaped ones: "[2, 3], not [2, 4]"

    @classmethod
    def of(cls, tensors: Tensors, model: ConditionedModel) -> Differences:
        return cls.between(
            {name: stored.shape for name, stored in tensors.items()}, model.state_dict()
        )

    @classmethod
    def between(
        cls, found: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]
    ) -> Differences:
        wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        reshaped = [
            name for name, shape in wanted.items() if name in found and found[name] != shape
        ]
        return cls(
            missing=tuple(name for name in wanted if name not in found),
            unexpected=tuple(name for name in found if name not in wanted),
            reshaped=tuple(reshaped),
            shapes={name: f"{list(found[name])}, not {list(wanted[name])}" for name in reshaped},
        )

    def __len__(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.reshaped)

    def __str__(self) -> str:
        """All of them, with the same name in several blocks told once."""
        parts = [("missing", self.missing), ("unexpected", self.unexpected)]
        told = [f"{what} {_listed(names)}" for what, names in parts if names]
        if self.reshaped:
            told.append(f"of another shape {_listed(self.reshaped, self.shapes)}")
        return f"{len(self)} differences: {'; '.join(told)}"


def check_names(
    source: Any,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, Tensor],
    *,
    exact: bool = True,
) -> None:
    """Raise ValueError unless every tensor of ``wanted`` is found in its shape (and, if exact, nothing else)."""
    differences = Differences.between(
        found if exact else {n: s for n, s in found.items() if n in wanted}, wanted
    )
    if differences:
        raise ValueError(
            f"got weights of another model in {source} ({differences}); expected those of the configured model; "
            "change the checkpoint or the model"
        )


def fitted(
    weights: Weights, model: ConditionedModel, *, convert: Collection[str] = (), strict: bool = True
) -> Weights:
    """The weights as the model takes them: converted where asked for, and checked name by name.

    Args:
        weights: opened weights.
        model: the bare model, which may be on the meta device.
        convert: names of ``CONVERSIONS`` to apply; one that finds nothing to convert is told and does nothing.
        strict: refuse any difference. Otherwise what differs is left out, with a warning.

    Raises:
        ValueError: with all differences, or if nothing fits at all.
    """
    weights = _converted(weights, model, check_conversions(convert))
    differences = Differences.of(weights.tensors, model)
    if not differences:
        return weights
    left_out = {*differences.unexpected, *differences.reshaped}
    if strict or len(left_out) == len(weights.tensors):
        helpful = [
            name
            for name in CONVERSIONS
            if len(Differences.of(_converted(weights, model, (name,)).tensors, model))
            < len(differences)
        ]
        hint = f", or ask for the conversion: convert={helpful}" if helpful else ""
        raise ValueError(
            f"got weights of another model in {weights.path} ({differences}); expected those of "
            f"{type(model).__name__} as configured; change the checkpoint or the config's model{hint}"
        )
    logger.warning("weights: loading what fits of %s (%s)", weights.path, differences)
    return replace(
        weights, tensors={n: stored for n, stored in weights.tensors.items() if n not in left_out}
    )


def _converted(weights: Weights, model: ConditionedModel, names: tuple[str, ...]) -> Weights:
    tensors, notes = dict(weights.tensors), list(weights.notes)
    for name in names:
        changed = CONVERSIONS[name].changed(tensors, model)
        for tensor, stored in changed.items():
            before = list(tensors[tensor].shape) if tensor in tensors else "nothing"
            notes.append(f"conversion {name}: {tensor} from {before} to {list(stored.shape)}")
        if not changed:
            notes.append(f"conversion {name}: nothing to convert")
        tensors = {**tensors, **changed}
    return replace(weights, tensors=tensors, notes=tuple(notes))


def _listed(names: Iterable[str], shapes: dict[str, str] | None = None) -> str:
    """Names, those that differ in a block's number alone as one, each with its shapes."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        shape = f" {shapes[name]}" if shapes is not None else ""
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name) + shape, []).append(name + shape)
    told = [
        f"{kind} ({len(each)} times)" if len(each) > 1 else each[0] for kind, each in kinds.items()
    ]
    more = f", and {len(told) - SHOWN} more kinds of names" if len(told) > SHOWN else ""
    return ", ".join(told[:SHOWN]) + more
