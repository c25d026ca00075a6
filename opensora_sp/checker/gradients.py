"""Gradients of ranks against those of one process: how they are reduced, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .layouts import distance, match, partitions, wide


@dataclass(frozen=True)
class Reduction:
    """A way to make the gradients of one process from those of the ranks."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    where: str = ""

    def __str__(self) -> str:
        return self.name + self.where

    def __call__(self, parts: list[Tensor]) -> list[Tensor]:
        """The reduced gradient of each group of ranks; of each rank, if nothing is reduced."""
        if self.name == "none":
            return parts
        totals = [torch.stack([parts[rank] for rank in group]).sum(0) for group in self.groups]
        return [total / len(self.groups[0]) for total in totals] if self.name == "mean" else totals


def reductions(num_ranks: int, declared: str | None) -> list[Reduction]:
    """The one that is declared, or all that are tried, in the order of preference."""
    everyone = tuple(range(num_ranks))
    if declared is not None:
        return [Reduction(declared, (everyone,))]
    tried = [Reduction("none", (everyone,))]
    for where, groups in partitions(num_ranks):
        frozen = tuple(tuple(group) for group in groups)
        tried += [Reduction("mean", frozen, where), Reduction("sum", frozen, where)]
    return tried


@dataclass
class Gradients:
    """Gradients by name: of one process, and of each rank, None where there is none.

    Attributes:
        bounds: of the relative errors.
        floor: least scale of an error: where a gradient cancels, rounding is all of it.
    """

    reference: Mapping[str, Tensor]
    parts: Mapping[str, list[Tensor | None]]
    bounds: Mapping[str, float]
    floor: float

    def infer(self, tried: Iterable[Reduction]) -> Reduction:
        """The reduction that makes most gradients equal; the first of those that do."""
        counts = {reduction: len(self.kinds(reduction)) for reduction in tried}
        return min(counts, key=lambda reduction: counts[reduction])

    def kinds(self, reduction: Reduction) -> dict[str, str]:
        """The kind of each gradient that differs."""
        kinds = {name: self._kind(name, reduction) for name in self.reference}
        return {name: kind for name, kind in kinds.items() if kind is not None}

    def _kind(self, name: str, reduction: Reduction) -> str | None:
        reference, bound = wide(self.reference[name]), self.bounds[name]
        parts = [
            wide(torch.zeros_like(self.reference[name]) if part is None else part)
            for part in self.parts[name]
        ]
        if any(part.shape != reference.shape for part in parts):
            # Shards of a parameter, as of tensor parallelism.
            shards = match(reference, parts, bound, is_final=True)
            return None if shards is not None and shards.error <= bound else "different"

        size = len(reduction.groups[0])
        kinds = {
            self._kind_of(gradient, reference, bound, size) for gradient in reduction(parts)
        } - {None}
        return None if not kinds else kinds.pop() if len(kinds) == 1 else "different"

    def _kind_of(self, got: Tensor, reference: Tensor, bound: float, size: int) -> str | None:
        explained: dict[str | None, float] = {
            None: 1.0,
            "times P": size,
            "divided by P": 1 / size,
            "sign": -1.0,
            "missing": 0.0,
        }
        for kind, factor in explained.items():
            scale = max(float(reference.abs().max()) if reference.numel() else 0.0, self.floor)
            error = distance(got, reference * factor, scale)
            if error <= bound * max(factor, 1.0) and not math.isnan(error):
                return kind
        return "different"
