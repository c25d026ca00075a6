"""Bytes that ranks send to each other in one forward and backward pass: what a ``CommLedger`` counts.

The comparison of shapes before each forward ("check", 16 bytes) and ZeRO's own traffic are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from opensora_sp.parallel import Options
from opensora_sp.parallel.layout import SPATIAL_ROWS, plan_exchange
from opensora_sp.parallel.low_precision import SCALE_BYTES
from opensora_sp.parallel.strategies import (
    BranchSwitch,
    OneLayout,
    SplitGather,
    SwitchRows,
    WholeSamples,
)

from .sharing import HEADS, Mode, Shape

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
    mode: Mode,
    shape: Shape,
    options: Options,
    ranks: int,
    *,
    element_size: int,
    checkpointing: bool,
    training: bool,
) -> Traffic:
    """What is sent for one micro-batch; for sampling forward alone, without the gathered output."""
    if mode is SplitGather:
        forward, backward = _gathered(shape, ranks, element_size)
    else:
        forward, backward = _exchanged(_exchanges(mode, shape, options, element_size), shape, ranks)
    nothing = [0] * ranks
    if not training:
        return Traffic(forward, nothing, nothing)
    resends = issubclass(mode, OneLayout) and (
        options.recompute_communication or not mode.keeps_received
    )
    return Traffic(forward, forward if checkpointing and resends else nothing, backward)


def output_gather(shape: Shape, mode: Mode, ranks: int, token_bytes: int) -> list[int]:
    """Bytes each rank sends to give all others the output of its tokens, as sampling does."""
    return [
        tokens * (ranks - 1) * token_bytes
        for tokens in shape.entries(shape.layouts(mode).tokens[1], ranks)
    ]


def tokens_changing_rank(shape: Shape, ranks: int) -> int:
    """Tokens that different ranks hold in spatial and in temporal rows: what one switch moves."""
    layouts = shape.layouts(SwitchRows).tokens
    plans = [
        plan_exchange(shape.sizes, *layouts, ranks, rank, CPU, windows=shape.windows)
        for rank in range(ranks)
    ]
    return sum(plan.sent_elsewhere(rank) for rank, plan in enumerate(plans))


def _exchanges(mode: Mode, shape: Shape, options: Options, element_size: int) -> list[_Exchange]:
    depth, token, head = (
        shape.depth,
        shape.width * element_size,
        shape.width // shape.heads * element_size,
    )
    layouts = shape.layouts(mode)
    spatial, temporal = layouts.tokens
    if mode is WholeSamples:
        return []
    if mode is SwitchRows:
        return [
            _Exchange(depth, spatial, temporal, token),
            _Exchange(depth - 1, temporal, spatial, token),
        ]
    if mode is BranchSwitch:
        sent = {None: token, "bf16": 2 * shape.width, "fp8": shape.width + SCALE_BYTES}[
            options.comm_dtype
        ]
        return [
            _Exchange(depth, spatial, SPATIAL_ROWS, sent),
            _Exchange(depth, SPATIAL_ROWS, spatial, sent),
        ]
    found = []
    for i, (held, attends) in enumerate(zip(layouts.tokens, layouts.attention, strict=True)):
        if attends == HEADS and i:  # tokens of a head in the order of the temporal rows
            attends = "h | b s t" if shape.windows is None else "h | b w p t"
        if "h" in attends.split():
            found.append(_Exchange(depth, f"{held} h", attends, 3 * head))  # queries, keys, values
            found.append(_Exchange(depth, attends, f"{held} h", head))
    return found


def _exchanged(exchanges: list[_Exchange], shape: Shape, ranks: int) -> tuple[list[int], list[int]]:
    forward, backward = [0] * ranks, [0] * ranks
    for one in exchanges:
        for rank in range(ranks):
            sizes = shape.axes(one.left)
            plan = plan_exchange(
                sizes, one.left, one.entered, ranks, rank, CPU, windows=shape.windows
            )
            forward[rank] += one.count * one.entry_bytes * plan.sent_elsewhere(rank)
            backward[rank] += (
                one.count * one.entry_bytes * (sum(plan.recv_splits) - plan.recv_splits[rank])
            )
    return forward, backward


def _gathered(shape: Shape, ranks: int, element_size: int) -> tuple[list[int], list[int]]:
    """Every attention gathers all tokens: forward each rank sends its rows to all, backward all others' gradients."""
    tokens = shape.entries(shape.layouts(SplitGather).tokens[1], ranks)
    token_bytes = 2 * shape.depth * shape.width * element_size
    return [n * (ranks - 1) * token_bytes for n in tokens], [
        (sum(tokens) - n) * token_bytes for n in tokens
    ]
