"""The default: tokens switch between spatial and temporal rows, between the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.graphs import uncompiled

from ..batch_shape import BatchShape
from ..collectives import exchange
from ..cost_model import ChunkCosts, FewUnitsCosts
from ..layout import SPATIAL_ROWS, TEMPORAL_ROWS, ExchangePlan, balanced_sizes, plan_exchange
from ..options import Options
from ..overlap import InFlightSwitch
from ..protocols import Rows
from ..typed import Local
from .base import Strategy
from .exchanges import AllToAll, Exchange
from .registry import strategy_for


class SwitchRows(Strategy):
    """One all-to-all between two blocks: 2 u.

    The method of DSP (Zhao et al., 2024). Here ranges of rows are balanced, so that nothing has to
    divide and nothing is padded.
    """

    label = "switch"
    condition = "otherwise"

    in_flight: InFlightSwitch | None = None  # while a block runs whose end is sent in chunks

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
            AllToAll(shape.depth - 1, temporal, spatial, token),  # tokens leave in temporal rows
        ]

    def switch(self, local: Local, x: Tensor | InFlightSwitch, rows: Rows) -> tuple[Tensor, Rows]:
        target = self.local_rows(rows.transposed())
        if isinstance(x, InFlightSwitch):
            tokens = x.wait()
        else:
            tokens = exchange(x.flatten(0, 1), self._chunk_plans(rows, x.device)(), self.group)
        return tokens.unflatten(0, (target.count, target.length)), target

    def segment(
        self,
        local: Local,
        function: Local,
        rows: Rows,
        *args: Any,
        last: bool,
        **options: Any,
    ) -> Any:
        overlaps = self.options.overlap_backward or self._num_chunks(rows) > 1
        if last or not overlaps:
            return local(function, rows, *args, last=last, **options)

        plans = self._chunk_plans(rows, args[0].device)
        in_flight = InFlightSwitch(
            plans, self.group, overlap_backward=self.options.overlap_backward
        )

        def started(*args: Any) -> InFlightSwitch:
            self.in_flight = in_flight
            try:
                x = function(*args)  # its tokenwise end has started the switch, if it has one
            finally:
                self.in_flight = None
            return x if isinstance(x, InFlightSwitch) else in_flight.start([x], 1)

        return local(started, rows, *args, last=last, **options)

    def tokenwise(self, local: Local, *args: Any) -> Any:
        return self._in_chunks(local, *args) if self.options.overlaps else local(*args)

    @uncompiled  # each forward has an in-flight switch of its own, which belongs to no graph
    def _in_chunks(
        self,
        local: Local,
        function: Local,
        rows: Rows,
        tokens: Sequence[Tensor],
        entries: Sequence[Tensor],
        part: Any = None,
    ) -> Any:
        if self.in_flight is None:
            return local(function, rows, tokens, entries, part)

        num_chunks = self._num_chunks(rows)
        if num_chunks == 1:
            # The bits of the plain switch: entries by row would be reduced in another order.
            return self.in_flight.start([function(*tokens, *entries, part)], num_chunks)

        sizes = balanced_sizes(rows.count, num_chunks)
        of_tokens = zip(*(x.split(sizes) for x in tokens), strict=True)
        chunks = zip(of_tokens, _entries_of_chunks(entries, part, sizes), strict=True)
        return self.in_flight.start((function(*xs, *own) for xs, own in chunks), num_chunks)

    def _num_chunks(self, rows: Rows) -> int:
        """As many as configured, but none empty on any rank."""
        return max(1, min(self.options.num_chunks, *self.row_counts(rows)))

    def _chunk_plans(self, rows: Rows, device: torch.device) -> Callable[..., ExchangePlan]:
        """Plans a switch of these rows, or its (chunk, num_chunks). It holds no tensor of the
        batch, so it may outlive it.
        """
        source, target = self.layout_of(rows), self.layout_of(rows.transposed())
        ranks, rank = self.mesh.sp_size, self.mesh.sp_rank
        return partial(plan_exchange, self.axes(rows), source, target, ranks, rank, device)


def chunk_costs(
    options: Options, shape: BatchShape, ranks: int, *, element_size: int
) -> ChunkCosts:
    """Cost of a switch in chunks, for a group of ranks on one node or several."""
    held = max(shape.entries(SPATIAL_ROWS, ranks))
    sent = held * (ranks - 1) / ranks * shape.width * element_size
    return ChunkCosts(options.cost_model, options.link, sent)


def with_chunks(options: Options, shape: BatchShape, ranks: int, *, element_size: int) -> Options:
    """The options for switches of this shape: ``overlap_chunks="auto"`` is a number."""
    if options.overlap_chunks != "auto" or strategy_for(shape, options, ranks) is not SwitchRows:
        return options
    costs = chunk_costs(options, shape, ranks, element_size=element_size)
    return replace(options, overlap_chunks=costs.best_number)


def fewest_rows(shape: BatchShape, ranks: int) -> int:
    """Rows of the rank with fewest, in either layout: as many chunks a switch can always have."""
    lengths = {SPATIAL_ROWS: shape.patches, TEMPORAL_ROWS: shape.frames}
    return min(min(shape.entries(layout, ranks)) // length for layout, length in lengths.items())


def few_frames_costs(shape: BatchShape, options: Options, ranks: int) -> FewUnitsCosts:
    """Cost of a spatial block by whole frames, and by frames x heads."""
    return options.cost_model.few_units(
        shape,
        ranks,
        options.link,
        unit=shape.patches,
        num_units=shape.num_frames,
        row_layout=TEMPORAL_ROWS,
        # Without temporal blocks, tokens stay in spatial rows.
        switches=2 if shape.alternates else 0,
    )


def few_frames_reason(shape: BatchShape, options: Options, ranks: int, choice: str) -> str:
    """Why frames fewer than ranks are distributed so."""
    costs = few_frames_costs(shape, options, ranks)
    return (
        f"B*T={shape.num_frames} frames are fewer than {ranks} ranks: {choice}, "
        f"which costs less ({costs.whole * 1e6:.3g} us a spatial block by whole frames, "
        f"{costs.heads * 1e6:.3g} us by frames x heads)"
    )


def _entries_of_chunks(
    entries: Sequence[Tensor], part: Any, sizes: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Entries of a modulation, and the part of their rows, of chunks of rows of these sizes."""
    if part is not None:
        starts = accumulate(sizes[:-1], initial=0)
        return [(*entries, part.after(start)) for start in starts]
    by_row = [_expand_rows(entry, sum(sizes)).split(sizes, dim=1) for entry in entries]
    return [(*chunk, None) for chunk in zip(*by_row, strict=True)]


def _expand_rows(entry: Tensor, count: int) -> Tensor:
    """A modulation's entry ``[b, 1 or n, 1 or L, C]`` row by row, ``[1, count, 1 or L, C]``."""
    return entry.expand(-1, count // len(entry), -1, -1).flatten(0, 1)[None]
