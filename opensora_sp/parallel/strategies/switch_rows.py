"""The default: tokens switch between spatial and temporal rows, between the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..batch_shape import BatchShape
from ..collectives import exchange
from ..cost_model import FewUnitsCosts
from ..layout import ExchangePlan, run_sizes
from ..options import Options
from ..overlap import InFlightSwitch
from ..protocols import Rows
from ..typed import uncompiled
from .base import Local, Strategy
from .exchanges import AllToAll, Exchange


class SwitchRows(Strategy):
    """One all-to-all between two blocks: 2 u.

    The method of DSP (Zhao et al., 2024). Here runs of rows are balanced, so that nothing has to
    divide and nothing is padded.
    """

    label = "switch"
    condition = "otherwise"

    in_flight: InFlightSwitch | None = None  # while a block runs whose end is sent in chunks

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        frames = shape.num_samples * shape.frames
        if frames >= ranks:
            return (
                f"B*T={frames} frames are enough for {ranks} ranks: each holds whole rows, and "
                "tokens switch between spatial and temporal rows"
            )
        return few_frames_reason(shape, options, ranks, "whole frames go to some ranks")

    @classmethod
    def exchanges(cls, shape: BatchShape, options: Options, element_size: int) -> list[Exchange]:
        spatial, temporal = cls.token_layouts(shape)
        token = shape.width * element_size
        return [
            AllToAll(shape.depth, spatial, temporal, token),
            AllToAll(shape.depth - 1, temporal, spatial, token),  # tokens leave in temporal rows
        ]

    def switch(
        self, local: Local[tuple[Tensor, Rows]], x: Tensor | InFlightSwitch, rows: Rows
    ) -> tuple[Tensor, Rows]:
        turned = self.held(rows.transposed())
        if isinstance(x, InFlightSwitch):
            tokens = x.wait()
        else:
            tokens = exchange(x.flatten(0, 1), self._plans(rows, x.device)(), self.group)
        return tokens.unflatten(0, (turned.count, turned.length)), turned

    def segment(
        self,
        local: Local[Any],
        function: Local[Any],
        rows: Rows,
        *args: Any,
        recompute: bool,
        last: bool,
    ) -> Any:
        overlaps = self.options.overlap_backward or self._num_chunks(rows) > 1
        if last or not overlaps:
            return local(function, rows, *args, recompute=recompute, last=last)

        plans = self._plans(rows, args[0].device)
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

        return local(started, rows, *args, recompute=recompute, last=last)

    def tokenwise(
        self, local: Local[Tensor], function: Local[Tensor], rows: Rows, x: Tensor, *entries: Tensor
    ) -> Tensor | InFlightSwitch:
        if self.options.overlap_chunks == 1 and not self.options.overlap_backward:
            return local(function, rows, x, *entries)
        return self._in_chunks(local, function, rows, x, *entries)

    @uncompiled  # each forward has an in-flight switch of its own, which belongs to no graph
    def _in_chunks(
        self, local: Local[Tensor], function: Local[Tensor], rows: Rows, x: Tensor, *entries: Tensor
    ) -> Tensor | InFlightSwitch:
        if self.in_flight is None:
            return local(function, rows, x, *entries)

        num_chunks = self._num_chunks(rows)
        if num_chunks == 1:
            # The bits of the plain switch: entries by row would be reduced in another order.
            return self.in_flight.start([function(x, *entries)], num_chunks)

        sizes = run_sizes(rows.count, num_chunks)
        entries_by_row = (_by_row(entry, rows.count).split(sizes, dim=1) for entry in entries)
        chunks = zip(x.split(sizes), *entries_by_row, strict=True)
        return self.in_flight.start((function(*chunk) for chunk in chunks), num_chunks)

    def _num_chunks(self, rows: Rows) -> int:
        """At most as many as configured, none small or empty; the same on all ranks."""
        fewest = min(stop - start for start, stop in self.runs(rows))
        worthwhile = fewest * rows.length // self.options.cost_model.min_chunk_tokens
        return max(1, min(self.options.overlap_chunks, worthwhile, fewest))

    def _plans(self, rows: Rows, device: torch.device) -> Callable[..., ExchangePlan]:
        return self.plans(rows, self.layout(rows), self.layout(rows.transposed()), device)


def few_frames_costs(shape: BatchShape, options: Options, ranks: int) -> FewUnitsCosts:
    """Cost of a spatial block by whole frames, and by frames x heads."""
    return options.cost_model.few_units(
        shape,
        ranks,
        unit=shape.patches,
        num_units=shape.num_samples * shape.frames,
        held=-(-shape.num_samples * shape.patches // ranks) * shape.frames,  # in temporal rows
    )


def few_frames_reason(shape: BatchShape, options: Options, ranks: int, choice: str) -> str:
    """Why frames fewer than ranks are distributed so."""
    costs = few_frames_costs(shape, options, ranks)
    return (
        f"B*T={shape.num_samples * shape.frames} frames are fewer than {ranks} ranks: {choice}, "
        f"which costs less ({costs.whole / 1e9:.3g} GFLOP-equivalents a spatial block by whole "
        f"frames, {costs.heads / 1e9:.3g} by frames x heads)"
    )


def _by_row(entry: Tensor, count: int) -> Tensor:
    """A modulation's entry ``[b, 1 or n, 1 or L, C]`` row by row, ``[1, count, 1 or L, C]``."""
    return entry.expand(-1, count // len(entry), -1, -1).flatten(0, 1)[None]
