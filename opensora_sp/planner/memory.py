"""Peak memory of one rank: what ZeRO keeps, by arithmetic, and activations, traced.

ZeRO's part follows ColossalAI's ``LowLevelZeroOptimizer`` as the plugin uses it (0.5.0): gradients wait in a bucket,
whose reduction needs a flat copy; stage 2 keeps this rank's part of the result, stage 1 all of it. The step then makes
fp32 copies of this rank's gradients, and gathers the new weights through a bucket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opensora_sp.models.registry import model_class

from .trace import Activations

BUCKET = 12 * 1024**2  # elements in ColossalAI's buckets, the default of LowLevelZeroPlugin
FP32 = 4
IN_PIECES = 1.5  # of the largest block; up to 1.2 have been measured (docs/planner.md)


@dataclass(frozen=True)
class Zero:
    """How the optimizer is sharded: over ``world`` ranks, weights and gradients of ``element_size`` bytes a number.

    ``accumulates``: several micro-batches per rank and step. ``fused``: the optimizer's step needs no temporaries, as
    HybridAdam's. ``foreach``: it takes all parameters at once, as torch's AdamW on CUDA.
    """

    world: int
    stage: int
    element_size: int
    accumulates: bool = False
    fused: bool = False
    foreach: bool = True

    def part(self, numel: int) -> int:
        """Elements of a parameter that one rank keeps; parameters are padded to a multiple of the ranks."""
        return -(-numel // self.world)


@dataclass(frozen=True)
class ModelSizes:
    """Elements of each trainable parameter, of the final layer, each pair of blocks and the rest; and frozen ones."""

    final: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...]
    frozen: int

    @classmethod
    def of(cls, name: str, config: Any) -> ModelSizes:
        with torch.device("meta"):
            model: nn.Module = model_class(name)(config)
        pairs: list[list[int]] = [[] for _ in range(config.depth)]
        final: list[int] = []
        rest: list[int] = []
        frozen = sum(buffer.numel() for buffer in model.buffers())
        for parameter_name, parameter in model.named_parameters():
            block = re.match(r"\w*blocks\.(\d+)\.", parameter_name)
            if not parameter.requires_grad:
                frozen += parameter.numel()
            elif block:
                pairs[int(block[1])].append(parameter.numel())
            else:
                (final if parameter_name.startswith("final_layer") else rest).append(
                    parameter.numel()
                )
        return cls(tuple(final), tuple(map(tuple, pairs)), tuple(rest), frozen)

    @property
    def trainable(self) -> list[int]:
        return [*self.final, *(n for pair in self.pairs for n in pair), *self.rest]

    @property
    def total(self) -> int:
        return sum(self.trainable) + self.frozen


@dataclass(frozen=True)
class Kept:
    """Bytes that live all the time: weights (and copies of frozen ones), optimizer state, the EMA."""

    weights: int
    masters: int
    moments: int
    ema: int

    @classmethod
    def training(cls, sizes: ModelSizes, zero: Zero) -> Kept:
        parts = sum(zero.part(n) for n in sizes.trainable)
        return cls(
            weights=parts * zero.world * zero.element_size
            + sizes.frozen * (zero.element_size + FP32),
            masters=FP32 * parts,
            moments=2 * FP32 * parts + FP32 * len(sizes.trainable),
            ema=FP32 * parts,
        )

    @classmethod
    def sampling(cls, sizes: ModelSizes, element_size: int) -> Kept:
        return cls(weights=sizes.total * element_size, masters=0, moments=0, ema=0)

    @property
    def total(self) -> int:
        return self.weights + self.masters + self.moments + self.ema


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak, when it comes ("forward", "backward", "optimizer step"), and what is live then beside what is
    kept: gradients (with what their reduction, or the step, needs) and activations (with the batch).

    ``largest`` is the largest block of CUDA's caching allocator. It has to lie in one piece, and
    about as much may be free in smaller ones: a GPU of ``needed`` bytes holds it all.
    """

    total: int
    moment: str
    gradients: int
    activations: int
    largest: int = 0

    @property
    def needed(self) -> int:
        return self.total + round(IN_PIECES * self.largest)


def sampling_peak(kept: Kept, activations: Activations, depth: int) -> Peak:
    """The peak of one call of the model without gradients."""
    live = round(activations.at(depth))
    return Peak(kept.total + live, "forward", 0, live, activations.largest)


def training_peak(kept: Kept, sizes: ModelSizes, zero: Zero, activations: Activations) -> Peak:
    """The peak of a training step.

    Backward goes from the last pair of blocks to the first: activations become fewer, gradients more. With i pairs to
    go, as many activations live as at the peak of a model of i pairs; inside a pair they go as the gradients come.
    """
    moments = []
    bucket = Bucket(zero, sizes)
    for numel in sizes.final:
        bucket.add(numel)
    for index, pair in reversed(list(enumerate(sizes.pairs))):
        to_come = sum(pair)
        for numel in reversed(pair):
            bucket.add(numel)
            live = activations.at(index + to_come / sum(pair))
            moments.append(("backward", bucket.taken_peak(), round(live)))
            to_come -= numel
    for numel in reversed(sizes.rest):
        bucket.add(numel)
    bucket.reduce()
    moments.append(("backward", bucket.taken_peak(), activations.inputs))
    moments.append(
        ("optimizer step", bucket.kept * zero.element_size + _step(sizes, zero), activations.inputs)
    )
    moment, gradients, live = max(moments, key=lambda one: one[1] + one[2])
    return Peak(kept.total + gradients + live, moment, gradients, live, activations.largest)


class Bucket:
    """The gradients of a backward pass, in order of their coming: waiting, or reduced and kept (elements)."""

    def __init__(self, zero: Zero, sizes: ModelSizes) -> None:
        self.zero, self.waiting, self.kept, self.peak = zero, 0, 0, 0
        if zero.accumulates:  # what the micro-batches before have left
            self.kept = sum(self._left(n) for n in sizes.trainable)

    def add(self, numel: int) -> None:
        if self.waiting + numel > BUCKET:
            self.reduce(arriving=numel)
        self.waiting += numel
        self.peak = max(self.peak, self.kept + self.waiting)

    def reduce(self, arriving: int = 0) -> None:
        """Average over the ranks what waits, and keep what the stage keeps."""
        received = (
            self._left(self.waiting) if self.zero.stage == 2 else 0
        )  # stage 1 reduces the flat copy in place
        self.peak = max(self.peak, self.kept + 2 * self.waiting + received + arriving)
        if not self.zero.accumulates:
            self.kept += self._left(self.waiting)
        self.waiting = 0

    def taken_peak(self) -> int:
        """Bytes at the peak since the last call."""
        peak, self.peak = self.peak, self.kept + self.waiting
        return peak * self.zero.element_size

    def _left(self, numel: int) -> int:
        return self.zero.part(numel) if self.zero.stage == 2 else numel


def _step(sizes: ModelSizes, zero: Zero) -> int:
    """Bytes that the optimizer's step adds to the gradients kept: copies and temporaries, or gathered weights."""
    parts = [zero.part(n) for n in sizes.trainable]
    casts = zero.element_size != FP32
    copies = FP32 * sum(parts) if casts else 0
    temporaries = 0 if zero.fused else FP32 * (sum(parts) if zero.foreach else 2 * max(parts))
    gathered = (
        min(sum(parts), BUCKET) * zero.element_size * (casts + 1 + zero.world)
    )  # cast, flat, from all ranks
    whole = max(sizes.trainable) * zero.element_size
    return max(copies + temporaries, gathered + whole)
