"""Strategies of whole rows: switches between spatial and temporal rows, and whole samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.graphs import uncompiled

from ..batch_shape import BatchShape, Rows
from ..collectives import exchange
from ..layout import ExchangePlan, balanced_sizes, plan_exchange
from ..options import Options
from ..overlap import InFlightSwitch
from .heads import few_frames_reason
from .strategy import (
    AllToAll,
    BlockLayouts,
    Exchange,
    Function,
    GridOrShape,
    Strategy,
    SwitchFn,
    Tensors,
)

SAMPLES = "b | t s"


class WholeSamples(Strategy):
    """Every rank holds whole samples, in both layouts, so nothing is sent."""

    label = "whole samples"
    condition = "P divides B"
    moves = "no token"

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        return shape.num_samples % ranks == 0

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        if ranks == 1:
            return "sp_size is 1: one rank holds the whole batch, nothing is sent"
        B = shape.num_samples
        return f"{ranks} ranks divide B={B}: each holds {B // ranks} whole samples, no token moves"

    @classmethod
    def token_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(SAMPLES, SAMPLES)


class SwitchRows(Strategy):
    """One all-to-all between two blocks: 2 u.

    The method of DSP (Zhao et al., 2024). Here ranges of rows are balanced, so that nothing has to
    divide and nothing is padded.

    With overlap ``segment``, ``tokenwise`` and ``switch`` hand an ``InFlightSwitch`` on, which is
    the model's ``x`` between the last two.
    """

    label = "switch"
    condition = "otherwise"

    # While a block runs whose end is sent in chunks.
    in_flight: InFlightSwitch | None = None

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        if shape.num_frames >= ranks and not shape.alternates:
            return (
                f"B*T={shape.num_frames} frames are enough for {ranks} ranks: each holds whole rows"
            )
        if shape.num_frames >= ranks:
            return (
                f"B*T={shape.num_frames} frames are enough for {ranks} ranks: each holds whole "
                "rows, and tokens switch between spatial and temporal rows"
            )
        return few_frames_reason(shape, options, ranks, "whole frames go to some ranks")

    @classmethod
    def exchanges(cls, shape: BatchShape, options: Options, element_size: int) -> list[Exchange]:
        if not shape.alternates:
            return []
        spatial, temporal = cls.token_layouts(shape)
        token = shape.width * element_size
        return [
            AllToAll(shape.depth, spatial, temporal, token),
            # Tokens leave in temporal rows.
            AllToAll(shape.depth - 1, temporal, spatial, token),
        ]

    def switch(
        self, local: SwitchFn, x: Tensor | InFlightSwitch, rows: Rows
    ) -> tuple[Tensor, Rows]:
        # Rows follow from the shape alone, so a rank knows what arrives before anything is sent.
        target = self.local_rows(rows.transposed())
        if isinstance(x, InFlightSwitch):
            tokens = x.wait()
        else:
            plan = self._switch_planner(rows, x.device)()
            tokens = exchange(x.flatten(0, 1), plan, self.member.sp_group)
        return tokens.unflatten(0, (target.count, target.length)), target

    def segment(
        self, local: Function, work: Function, rows: Rows, *args: Any, recompute: Any, last: bool
    ) -> Any:
        overlaps = self.options.overlap_backward or self._num_chunks(rows) > 1
        if last or not overlaps:
            return local(work, rows, *args, recompute=recompute, last=last)

        # One for each segment and forward: recomputation starts it again.
        plans = self._switch_planner(rows, args[0].device)
        in_flight = InFlightSwitch(
            plans, self.member.sp_group, overlap_backward=self.options.overlap_backward
        )

        def run(*args: Any) -> Any:
            self.in_flight = in_flight
            try:
                # Its tokenwise end has started the switch, if it has one.
                x: Any = work(*args)
            finally:
                self.in_flight = None
            # A block without a tokenwise end is sent as one chunk, whose gradient can be in flight
            # all the same.
            return x if isinstance(x, InFlightSwitch) else in_flight.start([x], 1)

        return local(run, rows, *args, recompute=recompute, last=last)

    def tokenwise(
        self, function: Function, rows: Rows, tokens: Tensors, entries: Tensors, part: Any
    ) -> Any:
        if not self.options.overlaps:
            return function(*tokens, *entries, part)
        return self._in_chunks(function, rows, tokens, entries, part)

    # Each forward has an in-flight switch, which belongs to no graph.
    @uncompiled
    def _in_chunks(
        self, function: Function, rows: Rows, tokens: Tensors, entries: Tensors, part: Any
    ) -> Any:
        if self.in_flight is None:
            return function(*tokens, *entries, part)

        num_chunks = self._num_chunks(rows)
        if num_chunks == 1:
            # The bits of the plain switch: entries by row would be reduced in another order.
            return self.in_flight.start([function(*tokens, *entries, part)], num_chunks)

        # Chunks differ by one row at most, so that each hides the exchange of the one before.
        sizes = balanced_sizes(rows.count, num_chunks)
        token_chunks = zip(*(x.split(sizes) for x in tokens), strict=True)
        chunks = zip(token_chunks, _entries_of_chunks(entries, part, sizes), strict=True)
        results = (function(*chunk, *modulation) for chunk, modulation in chunks)
        return self.in_flight.start(results, num_chunks)

    def _num_chunks(self, rows: Rows) -> int:
        """As many as configured, but none empty on any rank."""
        return max(1, min(self.options.num_chunks, *self.row_counts(rows)))

    def _switch_planner(self, rows: Rows, device: torch.device) -> Callable[..., ExchangePlan]:
        """Plans a switch of these rows, or its (chunk, num_chunks). It holds no tensor of the
        batch, so it may outlive it.
        """
        source, target = self.layout_of(rows), self.layout_of(rows.transposed())
        ranks, rank = self.member.sp_size, self.member.sp_rank
        return partial(plan_exchange, self.axes(rows), source, target, ranks, rank, device)


def _entries_of_chunks(entries: Tensors, part: Any, sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    """Entries of a modulation, and the part of their rows, of chunks of rows of these sizes."""
    if part is not None:
        starts = accumulate(sizes[:-1], initial=0)
        return [(*entries, part.after(start)) for start in starts]
    by_row = [_expand_rows(entry, sum(sizes)).split(sizes, dim=1) for entry in entries]
    return [(*chunk, None) for chunk in zip(*by_row, strict=True)]


def _expand_rows(entry: Tensor, count: int) -> Tensor:
    """A modulation's entry ``[b, 1 or n, 1 or L, C]`` row by row, ``[1, count, 1 or L, C]``."""
    return entry.expand(-1, count // len(entry), -1, -1).flatten(0, 1)[None]
