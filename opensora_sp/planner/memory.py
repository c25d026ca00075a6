"""Peak memory of one rank: ZeRO's state by arithmetic, activations traced.

ZeRO's part follows ColossalAI's ``LowLevelZeroOptimizer`` as the plugin uses it (0.5.0): gradients
are collected in a bucket, whose reduction needs a flat copy; stage 2 keeps this rank's part of the
result, stage 1 all of it. The step of ``SequenceZeroOptimizer`` then makes fp32 copies of this
rank's gradients, and afterwards gathers the new weights in pieces.

With ``AccumulatingZeroOptimizer`` all gradients have a place in fp32 from the start, where the
reduction leaves this rank's shards; it copies a piece at a time.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from opensora_sp.config.sections import Lora
from opensora_sp.models.quantized import stored_tensors
from opensora_sp.models.recompute import EVERYTHING, OFFLOADED, STAGES, buffer_size
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.options import Options
from opensora_sp.parallel.strategies import strategy_for

from .trace import Activations, meta_model

BUCKET = 12 * 1024**2  # elements in ColossalAI's buckets, the default of LowLevelZeroPlugin
GATHERED = 8 * BUCKET  # elements of weights that are gathered at a time, or more; see _gathered
FP32 = 4
IN_PIECES = 1.5  # of the largest block; up to 1.2 have been measured (docs/planner.md)


@dataclass(frozen=True)
class Zero:
    """The sharding of the optimizer over ``world`` ranks.

    Weights and gradients have ``element_size`` bytes a number. ``accumulates``: several
    micro-batches per rank and step. ``accumulates_locally``: with ``AccumulatingZeroOptimizer``.
    """

    world: int
    stage: int
    element_size: int
    accumulates: bool = False
    accumulates_locally: bool = False

    def part(self, numel: int) -> int:
        """Elements of a parameter that one rank keeps, padded to equal parts."""
        return -(-numel // self.world)


@dataclass(frozen=True)
class ModelSizes:
    """Elements of each trainable parameter, by their part of the model, and of frozen ones.

    ``int8`` of the frozen ones are quantised weights, which take ``int8_bytes`` with their scales.
    """

    final: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...]
    frozen: int
    int8: int = 0
    int8_bytes: int = 0

    @classmethod
    def of(cls, name: str, config: Any, lora: Lora | None = None) -> ModelSizes:
        """Of a model, or of one of which adapters are trained alone."""
        model: nn.Module = meta_model(name, config, torch.float32, lora)
        pairs: list[list[int]] = [[] for _ in range(config.depth)]
        final: list[int] = []
        rest: list[int] = []
        frozen = sum(buffer.numel() for buffer in model.buffers())
        int8, int8_bytes = 0, 0

        for parameter_name, parameter in model.named_parameters():
            stored = stored_tensors(parameter)
            if len(stored) > 1:
                int8 += parameter.numel()
                int8_bytes += sum(tensor.nbytes for tensor in stored.values())
            if not parameter.requires_grad:
                frozen += parameter.numel()
                continue
            block = re.match(r"\w*blocks\.(\d+)\.", parameter_name)
            part = final if parameter_name.startswith("final_layer") else rest
            (pairs[int(block[1])] if block else part).append(parameter.numel())
        return cls(tuple(final), tuple(map(tuple, pairs)), tuple(rest), frozen, int8, int8_bytes)

    @property
    def trainable(self) -> list[int]:
        return [*self.final, *chain.from_iterable(self.pairs), *self.rest]

    @property
    def total(self) -> int:
        return sum(self.trainable) + self.frozen


@dataclass(frozen=True)
class Persistent:
    """Bytes of persistent state: weights (with copies of frozen ones), optimizer, EMA weights."""

    weights: int
    master_weights: int = 0
    moments: int = 0
    ema: int = 0

    @classmethod
    def training(
        cls,
        sizes: ModelSizes,
        zero: Zero,
        *,
        moments: int = 2,
        scalars: int = 1,
        saves_frozen: bool = True,
    ) -> Persistent:
        """Of a training run, whose optimizer keeps so many moments and scalars of a parameter.

        ``saves_frozen``: it has fp32 copies of frozen weights for its checkpoints.
        """
        parts = sum(zero.part(n) for n in sizes.trainable)
        floating = sizes.frozen - sizes.int8
        frozen = floating * (zero.element_size + FP32 * saves_frozen) + sizes.int8_bytes
        return cls(
            weights=parts * zero.world * zero.element_size + frozen,
            master_weights=FP32 * parts,
            moments=FP32 * (moments * parts + scalars * len(sizes.trainable)),
            ema=FP32 * parts,
        )

    @property
    def total(self) -> int:
        return self.weights + self.master_weights + self.moments + self.ema


@dataclass(frozen=True)
class MemoryPeak:
    """Bytes at the peak, and its moment ("forward", "backward", "optimizer step").

    ``gradients`` (with the buffers of their reduction, or of the step) and ``activations`` (with
    the batch) are live then as well as the persistent state. ``largest`` is the largest block of
    CUDA's caching allocator. It has to lie in one piece, and about as much may be free in smaller
    ones: a GPU of ``needed`` bytes holds it all.
    """

    total: int
    moment: str
    gradients: int
    activations: int
    largest: int = 0

    @property
    def needed(self) -> int:
        return self.total + round(IN_PIECES * self.largest)


def training_peak(
    persistent: Persistent, sizes: ModelSizes, zero: Zero, activations: Activations
) -> MemoryPeak:
    """The peak of a training step.

    Backward goes from the last pair of blocks to the first: activations become fewer, gradients
    more. With i pairs to go, as many activations live as at the peak of a model of i pairs; inside
    a pair they are freed as the gradients come.
    """

    def at(moment: str, gradients: int, live: int) -> MemoryPeak:
        total = persistent.total + gradients + live
        return MemoryPeak(total, moment, gradients, live, activations.largest)

    kind = LocalGradients if zero.accumulates_locally else GradientBucket
    bucket, peaks = kind(zero, sizes), []
    for numel in sizes.final:
        bucket.add(numel)

    for index, pair in reversed(list(enumerate(sizes.pairs))):
        remaining = sum(pair)
        for numel in reversed(pair):
            bucket.add(numel)
            live = activations.at(index + remaining / sum(pair))
            peaks.append(at("backward", bucket.take_peak(), round(live)))
            remaining -= numel

    if not any(sizes.pairs):  # adapters of other layers
        live = activations.at(len(sizes.pairs))
        peaks.append(at("backward", bucket.take_peak(), round(live)))
    for numel in reversed(sizes.rest):
        bucket.add(numel)
    bucket.reduce()
    peaks.append(at("backward", bucket.take_peak(), activations.inputs))

    peaks.append(at("optimizer step", bucket.at_step(), activations.inputs))
    return max(peaks, key=lambda peak: peak.total)


class GradientBucket:
    """Elements of gradients during a backward pass: in the bucket, or reduced and kept."""

    def __init__(self, zero: Zero, sizes: ModelSizes) -> None:
        self.zero, self.sizes = zero, sizes
        self.filled, self.reduced, self.peak = 0, 0, 0
        if zero.accumulates:  # gradients of the micro-batches before
            self.reduced = sum(self._remaining(n) for n in sizes.trainable)

    def add(self, numel: int) -> None:
        if self.filled + numel > BUCKET:
            self.reduce(arriving=numel)
        self.filled += numel
        self.peak = max(self.peak, self.reduced + self.filled)

    def reduce(self, arriving: int = 0) -> None:
        """Average the bucket over the ranks, and keep the part that the stage keeps."""
        # Stage 1 reduces the flat copy in place.
        received = self._remaining(self.filled) if self.zero.stage == 2 else 0
        self.peak = max(self.peak, self.reduced + 2 * self.filled + received + arriving)

        if not self.zero.accumulates:
            self.reduced += self._remaining(self.filled)
        self.filled = 0

    def take_peak(self) -> int:
        """Bytes at the peak since the last call."""
        peak, self.peak = self.peak, self.reduced + self.filled
        return peak * self.zero.element_size

    def at_step(self) -> int:
        """Bytes in the optimizer's step."""
        parts = sum(self.zero.part(n) for n in self.sizes.trainable)
        copies = FP32 * parts if self.zero.element_size != FP32 else 0
        gathered = _gathered(self.sizes, self.zero)
        return self.reduced * self.zero.element_size + max(copies, gathered)

    def _remaining(self, numel: int) -> int:
        return self.zero.part(numel) if self.zero.stage == 2 else numel


class LocalGradients:
    """Gradients that a rank sums up in fp32: they are all there, and the one that arrives."""

    def __init__(self, zero: Zero, sizes: ModelSizes) -> None:
        self.zero, self.sizes, self.arriving = zero, sizes, 0
        self.elements = zero.world * sum(zero.part(n) for n in sizes.trainable)

    def add(self, numel: int) -> None:
        self.arriving = max(self.arriving, numel)

    def reduce(self) -> None:
        """The reduction waits for the step."""

    def take_peak(self) -> int:
        """Bytes at the peak since the last call."""
        arriving, self.arriving = self.arriving, 0
        return FP32 * self.elements + arriving * self.zero.element_size

    def at_step(self) -> int:
        """Bytes in the optimizer's step: a piece is copied and reduced, then weights gathered."""
        # All of them in one piece are sent from where they are.
        copied = GATHERED if self.elements > GATHERED else 0
        received = min(self.elements, GATHERED) // self.zero.world
        reduction = FP32 * (copied + received) if self.zero.world > 1 else 0
        return FP32 * self.elements + max(reduction, _gathered(self.sizes, self.zero))


def _gathered(sizes: ModelSizes, zero: Zero) -> int:
    """Bytes with which the optimizer's step gathers weights.

    torch's fused AdamW and HybridAdam have no temporaries.
    """
    parts = sum(zero.part(n) for n in sizes.trainable)
    casts = zero.element_size != FP32

    # As SequenceZeroOptimizer makes its buckets: of whole parameters.
    gathered = max(GATHERED, parts) if casts or zero.world == 1 else GATHERED
    gathered = max(min(gathered, zero.world * parts), max(sizes.trainable))
    # The weights of all ranks, and this rank's in their precision.
    received = gathered if zero.world > 1 else 0
    local = gathered // zero.world if casts else 0
    return zero.element_size * (received + local)


# Levels of recomputation, for ``grad_checkpoint="auto"``: the least with which a batch fits.
#
# All blocks keep the same stages of ``models/recompute.py``, and the first ones a stage more, as
# far as the estimated peak stays below the budget. Only where recomputing everything does not fit
# do the inputs of the last blocks, of as few as possible, go to the host. The choice depends on
# the config, the batch's shape and the device's memory alone, so all ranks choose alike.


LEVELS = tuple(range(OFFLOADED, EVERYTHING + 1))
COMPILED_LEVELS = (OFFLOADED, 0, EVERYTHING)
"""Compiled blocks keep all or nothing: levels in between need to see each operator."""

STAGE_PRODUCTS = (8, 0, 0, 6, 6, 8)
"""Matrix products of a block that each of ``STAGES`` computes, in C^2 a token."""

FRAGMENTED = 0.05  # of a device's memory
RESERVED = 3e9  # bytes of the CUDA context and of NCCL


def budget_of(memory: float) -> float:
    """Bytes of a device that a step may take, of all that it has."""
    return (1 - FRAGMENTED) * memory - RESERVED


def memory_for(needed: float) -> float:
    """Bytes of the smallest device on which a step may take so many: inverse of ``budget_of``."""
    return (needed + RESERVED) / (1 - FRAGMENTED)


def choose_levels(
    needed: Callable[[Sequence[int]], float],
    budget: float,
    num_blocks: int,
    levels: Sequence[int] = LEVELS,
) -> list[int]:
    """The level of each block: the highest that fit, or the lowest for all if nothing does.

    Args:
        needed: bytes that a step takes with these levels of the blocks; grows with them.
        levels: to choose from, in ascending order.
    """

    def at(position: int) -> list[int]:
        index, ahead = divmod(position, num_blocks)
        higher = levels[min(index + 1, len(levels) - 1)]
        return [higher] * ahead + [levels[index]] * (num_blocks - ahead)

    def needed_at(position: int) -> float:
        return needed(at(position))

    # All blocks alike first: each level that is looked at is traced, which takes long.
    alike = range(0, len(levels) * num_blocks, num_blocks)
    highest = alike[max(0, bisect_right(alike, budget, key=needed_at) - 1)]
    if highest == alike[-1]:
        return at(highest)
    between = range(highest + 1, highest + num_blocks)
    return at(highest + bisect_right(between, budget, key=needed_at))


def mixed(traced: Callable[[int], Activations], levels: Sequence[int]) -> Activations:
    """Activations of a model of these blocks, traced on models whose blocks are all alike."""
    shares = {level: count / len(levels) for level, count in Counter(levels).items()}
    alike = {level: traced(level) for level in shares}
    lowest = alike[min(shares)]  # it recomputes the largest part of a block at once
    return Activations(
        first=lowest.first,
        pair=sum(share * alike[level].pair for level, share in shares.items()),
        inputs=lowest.inputs,
        largest=max(traced_alike.largest for traced_alike in alike.values()),
    )


def pinned_bytes(
    levels: Sequence[int], shape: BatchShape, options: Options, ranks: int, element_size: int
) -> int:
    """Bytes of the buffers in which the busiest of ``ranks`` keeps inputs of blocks on the host."""

    def input_bytes(tokens: int) -> int:
        return buffer_size(tokens * shape.width * element_size)

    layouts = shape.of_blocks(strategy_for(shape, options, ranks).token_layouts(shape))
    tokens_of_ranks = zip(*(shape.entries(layout, ranks) for layout in layouts), strict=True)
    pair_bytes = max(sum(map(input_bytes, pair)) for pair in tokens_of_ranks)
    return pair_bytes * shape.depth * levels.count(OFFLOADED) // len(levels)


def recomputed_share(levels: Sequence[int]) -> float:
    """The share of all blocks' matrix products that backward computes again."""
    repeated = [sum(STAGE_PRODUCTS[max(0, level) :]) for level in levels]
    return sum(repeated) / len(levels) / sum(STAGE_PRODUCTS)


def describe(levels: Sequence[int]) -> str:
    """The activations that blocks keep, for the log and the planner's table."""
    num_blocks, lowest, highest = len(levels), min(levels), max(levels)
    if lowest == EVERYTHING:
        return "nothing is recomputed"
    if lowest == OFFLOADED:
        number = levels.count(OFFLOADED)
        return f"inputs of {number} of {num_blocks} blocks are kept in pinned host memory"
    kept = ", ".join(STAGES[:lowest]) or "nothing but the input"
    text = f"each of {num_blocks} blocks keeps {kept}"
    if highest == lowest:
        return text

    more = "everything" if highest == EVERYTHING else ", ".join(STAGES[lowest:highest])
    return f"{text}; {levels.count(highest)} of them {'also ' * (highest < EVERYTHING)}{more}"
