"""Gradients of ranks against those of one process: how they are reduced, and which kind differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layouts import distance, match, partitions, wide


class Reduction(NamedTuple):
    """A way to make the gradients of one process from the gradients of groups of ranks."""

    name: str
    groups: tuple[range, ...]
    where: str = ""

    def __str__(self) -> str:
        return self.name + self.where

    def reduce(self, parts: list[Tensor]) -> list[Tensor]:
        """The gradient of each group; of each rank, if nothing is reduced."""
        if self.name == "none":
            return parts
        grouped = [torch.stack([parts[rank] for rank in group]) for group in self.groups]
        return [group.mean(0) if self.name == "mean" else group.sum(0) for group in grouped]


def reductions(num_ranks: int, declared: str | None) -> list[Reduction]:
    """The one that is declared, or all that are tried, in the order of preference."""
    if declared is not None:
        return [Reduction(declared, (range(num_ranks),))]
    tried = reductions(num_ranks, "none")
    for where, groups in partitions(num_ranks):
        tried += [Reduction(name, tuple(groups), where) for name in ("mean", "sum")]
    return tried


class Gradients(NamedTuple):
    """Gradients by name: of one process, and of each rank, None where there is none.

    Attributes:
        bounds: of the relative errors.
        floor: least scale of an error: where a gradient cancels, rounding is all of it.
    """

    reference: Mapping[str, Tensor]
    parts: Mapping[str, Sequence[Tensor | None]]
    bounds: Mapping[str, float]
    floor: float

    def infer(self, tried: Iterable[Reduction]) -> Reduction:
        """The reduction that makes most gradients equal, then explains most of the others."""

        def unexplained(reduction: Reduction) -> tuple[int, int]:
            kinds = [*self.kinds(reduction).values()]
            return len(kinds), kinds.count("different")

        return min(tried, key=unexplained)

    def kinds(self, reduction: Reduction) -> dict[str, str]:
        """The kind of each gradient that differs."""
        kinds = {name: self._kind(name, reduction) for name in self.reference}
        return {name: kind for name, kind in kinds.items() if kind is not None}

    def _kind(self, name: str, reduction: Reduction) -> str | None:
        reference, bound = wide(self.reference[name]), self.bounds[name]
        given = self.parts[name]
        parts = [torch.zeros_like(reference) if part is None else wide(part) for part in given]
        if any(part.shape != reference.shape for part in parts):
            # Shards of a parameter, as of tensor parallelism.
            shards = match(reference, parts, bound, is_final=True)
            return None if shards is not None and shards.error <= bound else "different"

        size = len(reduction.groups[0])
        factors = {None: 1.0, "times P": size, "divided by P": 1 / size, "sign": -1.0, "missing": 0}
        scale = max(float(reference.abs().amax()) if reference.numel() else 0.0, self.floor)

        def kind_of(gradient: Tensor) -> str | None:
            for kind, factor in factors.items():
                if distance(gradient, reference * factor, scale) <= bound * max(factor, 1):
                    return kind
            return "different"

        kinds = {kind_of(gradient) for gradient in reduction.reduce(parts)} - {None}
        return "different" if len(kinds) > 1 else next(iter(kinds), None)
