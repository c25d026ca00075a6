"""Bytes that ranks send to each other in one forward and backward pass: what a ``CommLedger`` counts.

The comparison of shapes before each forward ("check", 16 bytes) and ZeRO's own traffic are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from opensora_sp.parallel import Options
from opensora_sp.parallel.layout import SPATIAL_ROWS, TEMPORAL_ROWS, plan_exchange
from opensora_sp.parallel.modes import BranchSwitch, SplitGather, SplitHeads, SwitchRows, Ulysses, WholeSamples
from opensora_sp.parallel.narrow import SCALE_BYTES

from .sharing import FRAME_HEADS, HEADS, Mode, Shape

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends to others, in forward, recomputation and backward."""

    forward: list[int]
    recompute: list[int]
    backward: list[int]

    @property
    def per_rank(self) -> list[int]:
        return [sum(phases) for phases in zip(self.forward, self.recompute, self.backward)]

    @property
    def mean(self) -> float:
        return sum(self.per_rank) / len(self.per_rank)

    @property
    def busiest(self) -> int:
        return max(self.per_rank)


@dataclass(frozen=True)
class _Exchange:
    """One kind of exchange between two layouts, ``count`` times forward and as often, in reverse, backward."""

    count: int
    left: str
    entered: str
    entry_bytes: int


def traffic(
    mode: Mode, shape: Shape, options: Options, ranks: int, *, element_size: int, checkpointing: bool, training: bool
) -> Traffic:
    """What is sent for one micro-batch; for sampling forward alone, without the gathered output."""
    if mode is SplitGather:
        forward, backward = _gathered(shape, ranks, element_size)
    else:
        forward, backward = _exchanged(_exchanges(mode, shape, options, element_size), shape, ranks)
    nothing = [0] * ranks
    if not training:
        return Traffic(forward, nothing, nothing)
    repeats = mode in (Ulysses, SplitGather) or (mode in (SplitHeads, BranchSwitch) and options.recompute_communication)
    return Traffic(forward, forward if checkpointing and repeats else nothing, backward)


def output_gather(shape: Shape, ranks: int, token_bytes: int) -> list[int]:
    """Bytes each rank sends to give all others the output of its temporal rows, as sampling does."""
    return [rows * shape.frames * (ranks - 1) * token_bytes for rows in shape.units(TEMPORAL_ROWS, ranks)]


def tokens_changing_rank(shape: Shape, ranks: int) -> int:
    """Tokens that different ranks hold in spatial and in temporal rows: what one switch moves."""
    return sum(
        plan_exchange(shape.sizes, SPATIAL_ROWS, TEMPORAL_ROWS, ranks, rank, CPU).sent_elsewhere(rank)
        for rank in range(ranks)
    )


def _exchanges(mode: Mode, shape: Shape, options: Options, element_size: int) -> list[_Exchange]:
    depth, token, head = shape.depth, shape.width * element_size, shape.width // shape.heads * element_size
    by_heads = TEMPORAL_ROWS + " h"
    if mode is WholeSamples:
        return []
    if mode is SwitchRows:
        return [
            _Exchange(depth, SPATIAL_ROWS, TEMPORAL_ROWS, token),
            _Exchange(depth - 1, TEMPORAL_ROWS, SPATIAL_ROWS, token),
        ]
    if mode is BranchSwitch:
        sent = {None: token, "bf16": 2 * shape.width, "fp8": shape.width + SCALE_BYTES}[options.comm_dtype]
        return [
            _Exchange(depth, TEMPORAL_ROWS, SPATIAL_ROWS, sent),
            _Exchange(depth, SPATIAL_ROWS, TEMPORAL_ROWS, sent),
        ]
    layouts = [FRAME_HEADS] if mode is SplitHeads else [HEADS, "h | b s t"]
    there = [_Exchange(depth, by_heads, layout, 3 * head) for layout in layouts]  # queries, keys, values
    return there + [_Exchange(depth, layout, by_heads, head) for layout in layouts]


def _exchanged(exchanges: list[_Exchange], shape: Shape, ranks: int) -> tuple[list[int], list[int]]:
    forward, backward = [0] * ranks, [0] * ranks
    for one in exchanges:
        sizes = {**shape.sizes, "h": shape.heads} if "h" in one.left else shape.sizes
        for rank in range(ranks):
            plan = plan_exchange(sizes, one.left, one.entered, ranks, rank, CPU)
            forward[rank] += one.count * one.entry_bytes * plan.sent_elsewhere(rank)
            backward[rank] += one.count * one.entry_bytes * (sum(plan.recv_splits) - plan.recv_splits[rank])
    return forward, backward


def _gathered(shape: Shape, ranks: int, element_size: int) -> tuple[list[int], list[int]]:
    """Every attention gathers all tokens: forward each rank sends its rows to all, backward all others' gradients."""
    rows = shape.units(TEMPORAL_ROWS, ranks)
    row_bytes = 2 * shape.depth * shape.frames * shape.width * element_size
    return [n * (ranks - 1) * row_bytes for n in rows], [(sum(rows) - n) * row_bytes for n in rows]
