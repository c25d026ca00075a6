"""The ways to share a batch between ranks. Each says what happens at the points that a model names.

A mode has one method for each kind of point; it gets what the point does by itself (``local``) and the point's
arguments. Which mode a batch takes depends on the user's ``Options`` and on its shape alone, so all ranks agree.

Figures are elements sent per rank for a spatial and a temporal block, forward, in ``u = (P-1)/P * B*T*S*C/P``.

Legend: B samples, T frames, S patches, H heads, D = C / H, P ranks, R rows held, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .collectives import exchange, gather_rows, keep_exchanged
from .cost_model import splits_heads, splits_windows
from .layout import (
    SPATIAL_ROWS,
    TEMPORAL_ROWS,
    WINDOW_COLUMNS,
    WINDOW_ROWS,
    ExchangePlan,
    plan_exchange,
    run_sizes,
    runs,
    unit_runs,
)
from .low_precision import narrow_exchange
from .mesh import SequenceMesh
from .options import Options
from .overlap import Flight
from .token_layout import Grid, Rows
from .typed import uncompiled

Result = TypeVar("Result")
Local = Callable[..., Result]  # what a point does by itself
MIN_CHUNK_TOKENS = 256  # smaller chunks cost more in launches than their overlap gains


class WholeSamples:
    """Every rank holds whole samples, in both layouts: nothing travels. Taken where P divides B. Base of the others."""

    def __init__(self, mesh: SequenceMesh, options: Options, heads: int) -> None:
        self.mesh, self.options, self.heads = mesh, options, heads

    def ends(self, rows: Rows) -> tuple[Rows, ...]:
        """All rows as tokens enter and as they leave, given all spatial rows; one where both are the same."""
        return rows, rows.turned()

    def shard(self, local: Local[Rows], grid: Grid) -> Rows:
        return self.held(self.ends(local(grid))[0])

    def switch(
        self, local: Local[tuple[Tensor, Rows]], x: Tensor, rows: Rows
    ) -> tuple[Tensor, Rows]:
        return local(x, rows)

    def spatial(self, local: Local[Tensor], x: Tensor, rows: Rows, *of_rows: Any) -> Tensor:
        """``of_rows`` is what the model has computed ahead for these rows; with others it is computed anew."""
        return local(x, rows, *of_rows)

    def temporal(self, local: Local[Tensor], x: Tensor, rows: Rows, *of_rows: Any) -> Tensor:
        return local(x, rows, *of_rows)

    def attend_spatial(
        self, local: Local[Tensor], q: Tensor, k: Tensor, v: Tensor, rows: Rows
    ) -> Tensor:
        return local(q, k, v, rows)

    def attend_temporal(
        self, local: Local[Tensor], q: Tensor, k: Tensor, v: Tensor, rows: Rows
    ) -> Tensor:
        return local(q, k, v, rows)

    def segment(
        self,
        local: Local[Any],
        function: Local[Any],
        rows: Rows,
        *args: Any,
        recompute: bool,
        last: bool,
    ) -> Any:
        return local(function, rows, *args, recompute=recompute, last=last)

    def rowwise(
        self, local: Local[Any], function: Local[Any], rows: Rows, x: Tensor, *entries: Tensor
    ) -> Any:
        return local(function, rows, x, *entries)

    window_rows = WINDOW_ROWS  # whose windows a rank holds whole

    def layout(self, rows: Rows) -> str:
        """How rows are dealt out to the ranks."""
        if rows.layout == "spatial":
            return SPATIAL_ROWS
        return TEMPORAL_ROWS if rows.grid.windows is None else self.window_rows

    @uncompiled
    def runs(self, rows: Rows) -> list[tuple[int, int]]:
        """The rows ``[start, stop)`` that each rank holds of all rows of a layout."""
        entries = runs(_axes(rows), self.layout(rows), self.mesh.sp_size, rows.grid.windows)
        return [(start // rows.length, stop // rows.length) for start, stop in entries]

    def held(self, rows: Rows) -> Rows:
        """This rank's run of all rows of a layout."""
        return rows.take(*self.runs(rows)[self.mesh.sp_rank])

    @uncompiled  # made once and kept, not a part of anyone's graph
    def plan(
        self,
        rows: Rows,
        left: str,
        entered: str,
        device: torch.device,
        chunk: int = 0,
        num_chunks: int = 1,
    ) -> ExchangePlan:
        """This rank's part in an exchange of the tokens, or of the heads of all tokens, of the rows' batch."""
        sizes = _axes(rows, h=self.heads) if "h" in left.split() else _axes(rows)
        ranks, rank = self.mesh.sp_size, self.mesh.sp_rank
        return plan_exchange(
            sizes, left, entered, ranks, rank, device, chunk, num_chunks, rows.grid.windows
        )

    @property
    def group(self) -> Any:
        return self.mesh.sp_group


class SwitchRows(WholeSamples):
    """Tokens switch between spatial and temporal rows, between the blocks: 2 u. DSP (Zhao et al., 2024) does so, too;
    here runs of rows are balanced, so nothing has to divide and nothing is padded."""

    flight: Flight | None = None  # while a block runs whose end is sent off in chunks

    def switch(
        self, local: Local[tuple[Tensor, Rows]], x: Tensor | Flight, rows: Rows
    ) -> tuple[Tensor, Rows]:
        turned = self.held(rows.turned())
        if isinstance(x, Flight):
            tokens = x.land()
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
        flight = Flight(plans, self.group, overlap_backward=self.options.overlap_backward)

        def launched(*args: Any) -> Flight:
            self.flight = flight
            try:
                x = function(*args)  # its rowwise end has launched it, if it has one
            finally:
                self.flight = None
            return x if isinstance(x, Flight) else flight.launch([x], 1)

        return local(launched, rows, *args, recompute=recompute, last=last)

    def rowwise(
        self, local: Local[Tensor], function: Local[Tensor], rows: Rows, x: Tensor, *entries: Tensor
    ) -> Tensor | Flight:
        if self.options.overlap_chunks == 1 and not self.options.overlap_backward:
            return local(function, rows, x, *entries)
        return self._in_chunks(local, function, rows, x, *entries)

    @uncompiled  # sends what it computes, and each forward has a flight of its own: not for a graph
    def _in_chunks(
        self, local: Local[Tensor], function: Local[Tensor], rows: Rows, x: Tensor, *entries: Tensor
    ) -> Tensor | Flight:
        if self.flight is None:
            return local(function, rows, x, *entries)
        num_chunks = self._num_chunks(rows)
        if num_chunks == 1:
            # Entries laid out by row would be reduced in another order: the same bits as without overlap.
            return self.flight.launch([function(x, *entries)], num_chunks)

        sizes = run_sizes(rows.count, num_chunks)
        entries_by_row = (_by_row(entry, rows.count).split(sizes, dim=1) for entry in entries)
        chunks = zip(x.split(sizes), *entries_by_row, strict=True)
        return self.flight.launch((function(*chunk) for chunk in chunks), num_chunks)

    def _num_chunks(self, rows: Rows) -> int:
        """The same on all ranks: as many as asked for, unless they would be small or a rank had none."""
        fewest = min(stop - start for start, stop in self.runs(rows))
        return max(
            1, min(self.options.overlap_chunks, fewest * rows.length // MIN_CHUNK_TOKENS, fewest)
        )

    def _plans(self, rows: Rows, device: torch.device) -> Callable[..., ExchangePlan]:
        """This rank's part in a switch, or in one of several chunks; holds nothing of the batch, which it outlives."""
        left, entered = self.layout(rows), self.layout(rows.turned())
        ranks, rank = self.mesh.sp_size, self.mesh.sp_rank
        return partial(
            plan_exchange,
            _axes(rows),
            left,
            entered,
            ranks,
            rank,
            device,
            windows=rows.grid.windows,
        )


class OneLayout(WholeSamples):
    """Tokens stay in one layout all the time; what an attention needs of the other is exchanged. Base of those below.

    What blocks receive is kept under checkpointing, so that recompute sends nothing, unless
    ``recompute_communication`` trades this for memory.
    """

    stays = "temporal"
    keeps_received = True

    def ends(self, rows: Rows) -> tuple[Rows, ...]:
        return (rows if rows.layout == self.stays else rows.turned(),)

    def switch(
        self, local: Local[tuple[Tensor, Rows]], x: Tensor, rows: Rows
    ) -> tuple[Tensor, Rows]:
        return x, rows

    def segment(
        self,
        local: Local[Any],
        function: Local[Any],
        rows: Rows,
        *args: Any,
        recompute: bool,
        last: bool,
    ) -> Any:
        if recompute and self.keeps_received and not self.options.recompute_communication:
            local = partial(local, context_fn=keep_exchanged)
        return local(function, rows, *args, recompute=recompute, last=last)

    def attend_by_heads(
        self,
        local: Local[Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        attended: Rows,
        units: str,
    ) -> Tensor:
        """Attend as in the layout of ``attended``, with entries (token, head) dealt out as ``units`` says.

        q, k, v are ``[R, L, H, D]``. Inside a unit, tokens lie as in that layout.
        """
        left = f"{self.layout(rows)} h"
        there, back = self.plan(rows, left, units, q.device), self.plan(rows, units, left, q.device)
        qkv = exchange(_stacked(q, k, v), there, self.group, kind="heads")
        qkv = qkv.view(-1, attended.length, 1, 3, q.shape[3])  # [rows of one head, L, 1, 3, D]
        out = local(*qkv.unbind(3), attended, self.units_of(attended, units))
        return exchange(out.flatten(0, 2), back, self.group, kind="heads").view(q.shape)

    @uncompiled
    def units_of(self, attended: Rows, units: str) -> list[int]:
        """Numbers of what attends together, in the order in which this rank gets them, once for each head."""
        sizes, windows = _axes(attended, h=self.heads), attended.grid.windows
        numbers = range(*unit_runs(sizes, units, self.mesh.sp_size, windows)[self.mesh.sp_rank])
        if units.startswith("h |"):  # every unit of the batch for each head
            return [*range(_num_units(attended))] * len(numbers)
        return [number // self.heads for number in numbers]


class SplitHeads(OneLayout):
    """Spatial attention is dealt out by frames x heads: q, k, v there and the output back, 4 u.

    For fewer frames than ranks, where whole spatial rows would leave ranks without work.
    """

    def attend_spatial(
        self, local: Local[Tensor], q: Tensor, k: Tensor, v: Tensor, rows: Rows
    ) -> Tensor:
        return self.attend_by_heads(local, q, k, v, rows, rows.turned(), "b t h | s")


class SplitWindows(OneLayout):
    """Tokens stay in spatial rows, and the attention of windows is dealt out by windows x heads: 4 u.

    For fewer windows than ranks.
    """

    stays = "spatial"

    def attend_temporal(
        self, local: Local[Tensor], q: Tensor, k: Tensor, v: Tensor, rows: Rows
    ) -> Tensor:
        return self.attend_by_heads(local, q, k, v, rows, rows.turned(), "b w h | p t")


class SplitBoth(SplitHeads):
    """Both attentions are dealt out by heads, of frames and of windows, where there are few of either: 8 u."""

    window_rows = WINDOW_COLUMNS

    def attend_temporal(
        self, local: Local[Tensor], q: Tensor, k: Tensor, v: Tensor, rows: Rows
    ) -> Tensor:
        return self.attend_by_heads(local, q, k, v, rows, rows, "b w h | p t")


class SplitClips(OneLayout):
    """Full attention over all tokens of a clip, dealt out by samples x heads: 4 u for each attention."""

    def attend_spatial(
        self, local: Local[Tensor], q: Tensor, k: Tensor, v: Tensor, rows: Rows
    ) -> Tensor:
        return self.attend_by_heads(local, q, k, v, rows, rows, "b h | s t")

    attend_temporal = attend_spatial


class BranchSwitch(OneLayout):
    """The input of each spatial attention is switched to spatial rows and its output back: 2 u, at N instead of
    N - 1/2 pairs. What travels is a branch, not the residual stream, so it may be rounded (``comm_dtype``)."""

    def spatial(self, local: Local[Tensor], x: Tensor, rows: Rows, *of_rows: Any) -> Tensor:
        spatial = self.held(rows.turned())
        received = self._exchange(x, rows, spatial)
        out = local(received.unflatten(0, (spatial.count, spatial.length)), spatial)
        return self._exchange(out, spatial, rows).view(x.shape)

    def _exchange(self, x: Tensor, left: Rows, entered: Rows) -> Tensor:
        plan = self.plan(left, self.layout(left), self.layout(entered), x.device)
        return narrow_exchange(
            x.flatten(0, 1), plan, self.group, kind="branch", dtype=self.options.comm_dtype
        )


class Ulysses(OneLayout):
    """DeepSpeed-Ulysses (Jacobs et al., 2023) at both attentions, a baseline: heads are dealt out and every rank gets
    all tokens of its own; 8 u, and again in recompute. Heads and lengths need not divide."""

    keeps_received = False
    window_rows = WINDOW_COLUMNS

    def attend_spatial(
        self, local: Local[Tensor], q: Tensor, k: Tensor, v: Tensor, rows: Rows
    ) -> Tensor:
        return self.attend_by_heads(local, q, k, v, rows, rows.turned(), "h | b t s")

    def attend_temporal(
        self, local: Local[Tensor], q: Tensor, k: Tensor, v: Tensor, rows: Rows
    ) -> Tensor:
        units = "h | b s t" if rows.grid.windows is None else "h | b w p t"
        return self.attend_by_heads(local, q, k, v, rows, rows, units)


class SplitGather(OneLayout):
    """All tokens are gathered for each attention, a baseline (ColossalAI's split_gather): 2 P u, again in recompute.

    Every rank computes the whole attention and keeps its own rows of it.
    """

    keeps_received = False
    window_rows = WINDOW_COLUMNS

    def spatial(self, local: Local[Tensor], x: Tensor, rows: Rows, *of_rows: Any) -> Tensor:
        everything, frames = rows.take(0, rows.total).turn(self._all(x, rows))  # [B * T, S, C]
        out, _ = frames.turn(local(everything, frames))
        return out[rows.start : rows.stop]

    def temporal(self, local: Local[Tensor], x: Tensor, rows: Rows, *of_rows: Any) -> Tensor:
        return local(self._all(x, rows), rows.take(0, rows.total))[rows.start : rows.stop]

    def _all(self, x: Tensor, rows: Rows) -> Tensor:
        return gather_rows(
            x, [stop - start for start, stop in self.runs(rows)], self.group, kind="tokens"
        )


def choose_mode(
    options: Options, batch: Any, width: int, heads: int, ranks: int
) -> type[WholeSamples]:
    """The mode for a batch: ``num_samples``, ``frames``, ``patches_per_frame``, the ``windows`` of its temporal
    attention (None for none), and whether attention is ``full``."""
    shape = batch.num_samples, batch.frames, batch.patches_per_frame
    if options.strategy != "switch":
        return Ulysses if options.strategy == "ulysses" else SplitGather
    if batch.num_samples % ranks == 0:
        return WholeSamples
    if batch.full:
        return SplitClips
    if options.placement == "branch":
        return BranchSwitch
    if batch.windows is not None and splits_windows(
        *shape, width, heads, ranks, batch.windows.sizes
    ):
        return SplitBoth if batch.num_samples * batch.frames < ranks else SplitWindows
    return SplitHeads if splits_heads(*shape, width, heads, ranks) else SwitchRows


def _num_units(rows: Rows) -> int:
    """Samples, rows or windows of a whole batch that attend each by itself."""
    if rows.grid.full:
        return rows.grid.num_samples
    if rows.layout == "spatial" or rows.grid.windows is None:
        return rows.total
    return rows.grid.num_samples * len(rows.grid.windows.sizes)


def _axes(rows: Rows, **more: int) -> dict[str, int]:
    grid = rows.grid
    return {"b": grid.num_samples, "t": grid.frames, "s": grid.patches_per_frame, **more}


def _by_row(entry: Tensor, count: int) -> Tensor:
    """An entry of a modulation ``[b, 1 or n, 1 or L, C]``, row by row: ``[1, count, 1 or L, C]``."""
    return entry.expand(-1, count // len(entry), -1, -1).flatten(0, 1)[None]


def _stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three ``[R, L, H, D]`` -> entries ``[R * L * H, 3 * D]``, so that one exchange takes them all."""
    return torch.stack([q, k, v], dim=3).flatten(0, 2).flatten(1)
