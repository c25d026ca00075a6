"""The ways to share a batch between ranks. Each says what happens at the points that a model names.

A mode has one method for each kind of point; it gets what the point does by itself (``local``) and the point's
arguments. Which mode a batch takes depends on the user's ``Options`` and on its shape alone, so all ranks agree.

Figures are elements sent per rank for a spatial and a temporal block, forward, in ``u = (P-1)/P * B*T*S*C/P``.

Legend: B samples, T frames, S patches, H heads, D = C / H, P ranks, R rows held, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .collectives import exchange, gather_rows, keep_exchanged
from .cost import splits_heads
from .layout import SPATIAL_ROWS, TEMPORAL_ROWS, ExchangePlan, balanced_run, plan_exchange, run_sizes
from .mesh import SequenceMesh
from .narrow import narrow_exchange
from .overlap import Flight

Local = Callable[..., Any]
Rows = Any  # the model's own description of the rows held: grid, layout, per_sample, length, total, turned(), take()
STRATEGIES = ("switch", "ulysses", "split_gather")
PLACEMENTS = ("stream", "branch")
STREAM_SWITCH = ("switch", "stream")  # between the blocks, where overlap is possible
COMM_DTYPES = ("bf16", "fp8")
MIN_CHUNK_TOKENS = 256  # smaller chunks cost more in launches than their overlap gains


@dataclass(frozen=True, kw_only=True)
class Options:
    """How ranks work together; see ``parallelize``. Checks itself."""

    strategy: str = "switch"
    placement: str = "stream"
    comm_dtype: str | None = None
    overlap_chunks: int = 1
    overlap_backward: bool = False
    recompute_communication: bool = False

    def __post_init__(self) -> None:
        known = dict(strategy=STRATEGIES, placement=PLACEMENTS, comm_dtype=(None, *COMM_DTYPES))
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"got {name} {getattr(self, name)!r}; expected one of {values}; choose one of these")
        if self.overlap_chunks < 1:
            raise ValueError(f"got overlap_chunks {self.overlap_chunks}; expected at least 1; 1 turns chunks off")
        if self.placement == "branch" and self.strategy != "switch":
            raise ValueError(
                f"got placement 'branch' with strategy {self.strategy!r}; expected strategy 'switch'; change either"
            )
        if self.comm_dtype is not None and self.placement != "branch":
            raise ValueError(
                f"got comm_dtype {self.comm_dtype!r} with placement {self.placement!r}, which moves the residual "
                "stream; expected None there, the model's own dtype: rounding would add up over the blocks; set "
                "placement='branch' or leave comm_dtype out"
            )
        if (self.overlap_chunks > 1 or self.overlap_backward) and (self.strategy, self.placement) != STREAM_SWITCH:
            raise ValueError(
                f"got overlap_chunks {self.overlap_chunks} and overlap_backward {self.overlap_backward} with strategy "
                f"{self.strategy!r} and placement {self.placement!r}; expected 'switch' and 'stream', where switches "
                "lie between blocks; change these or leave the overlap out"
            )


class WholeSamples:
    """Every rank holds whole samples, in both layouts: nothing travels. Taken where P divides B. Base of the others."""

    def __init__(self, mesh: SequenceMesh, options: Options) -> None:
        self.mesh, self.options = mesh, options

    def shard(self, local: Local, grid: Any) -> Rows:
        return self.held(local(grid))

    def switch(self, local: Local, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        return local(x, rows)

    def spatial(self, local: Local, x: Tensor, rows: Rows) -> Tensor:
        return local(x, rows)

    def temporal(self, local: Local, x: Tensor, rows: Rows) -> Tensor:
        return local(x, rows)

    def attend_spatial(self, local: Local, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        return local(q, k, v, rows)

    def attend_temporal(self, local: Local, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        return local(q, k, v, rows)

    def segment(self, local: Local, function: Local, rows: Rows, *args: Any, recompute: bool, last: bool) -> Any:
        return local(function, rows, *args, recompute=recompute, last=last)

    def rowwise(self, local: Local, function: Local, rows: Rows, *per_row: Tensor) -> Any:
        return local(function, rows, *per_row)

    def held(self, rows: Rows) -> Rows:
        """This rank's run of all rows of a layout."""
        return rows.take(*balanced_run(rows.total, self.mesh.sp_size, self.mesh.sp_rank))

    @torch.compiler.disable  # made once and kept, not a part of anyone's graph
    def plan(self, sizes: dict[str, int], left: str, entered: str, device: torch.device, *chunk: int) -> ExchangePlan:
        return plan_exchange(sizes, left, entered, self.mesh.sp_size, self.mesh.sp_rank, device, *chunk)

    @property
    def group(self) -> Any:
        return self.mesh.sp_group


class SwitchRows(WholeSamples):
    """Tokens switch between spatial and temporal rows, between the blocks: 2 u. DSP (Zhao et al., 2024) does so, too;
    here runs of rows are balanced, so nothing has to divide and nothing is padded."""

    flight: Flight | None = None  # while a block runs whose end is sent off in chunks

    def switch(self, local: Local, x: Tensor | Flight, rows: Rows) -> tuple[Tensor, Rows]:
        turned = self.held(rows.turned())
        if isinstance(x, Flight):
            tokens = x.land()
        else:
            tokens = exchange(x.flatten(0, 1), self._plan(rows, x.device), self.group)
        return tokens.unflatten(0, (turned.count, turned.length)), turned

    def segment(self, local: Local, function: Local, rows: Rows, *args: Any, recompute: bool, last: bool) -> Any:
        overlaps = self.options.overlap_backward or self._num_chunks(rows) > 1
        if last or not overlaps:
            return local(function, rows, *args, recompute=recompute, last=last)
        device = args[0].device  # the flight outlives the block, so it must not hold its input
        flight = Flight(
            lambda *chunk: self._plan(rows, device, *chunk), self.group, overlap_backward=self.options.overlap_backward
        )

        def launched(*args: Any) -> Flight:
            self.flight = flight
            try:
                x = function(*args)  # its rowwise end has launched it, if it has one
            finally:
                self.flight = None
            return x if isinstance(x, Flight) else flight.launch([x], 1)

        return local(launched, rows, *args, recompute=recompute, last=last)

    def rowwise(self, local: Local, function: Local, rows: Rows, *per_row: Tensor) -> Tensor | Flight:
        if self.options.overlap_chunks == 1 and not self.options.overlap_backward:
            return local(function, rows, *per_row)
        return self._in_chunks(local, function, rows, *per_row)

    @torch.compiler.disable  # sends what it computes, and each forward has a flight of its own: not for a graph
    def _in_chunks(self, local: Local, function: Local, rows: Rows, *per_row: Tensor) -> Tensor | Flight:
        if self.flight is None:
            return local(function, rows, *per_row)
        num_chunks = self._num_chunks(rows)
        sizes = run_sizes(rows.count, num_chunks)
        chunks = zip(*(z.split(sizes) for z in per_row), strict=True)
        return self.flight.launch((function(*chunk) for chunk in chunks), num_chunks)

    def _num_chunks(self, rows: Rows) -> int:
        """The same on all ranks: as many as asked for, unless they would be small or a rank had none."""
        tokens = rows.total // self.mesh.sp_size * rows.length
        return max(1, min(self.options.overlap_chunks, tokens // MIN_CHUNK_TOKENS, rows.total // self.mesh.sp_size))

    def _plan(self, rows: Rows, device: torch.device, *chunk: int) -> ExchangePlan:
        sizes, layouts = _axes(rows), (SPATIAL_ROWS, TEMPORAL_ROWS)
        return self.plan(sizes, *(layouts if rows.layout == "spatial" else layouts[::-1]), device, *chunk)


class TemporalRows(WholeSamples):
    """Tokens stay in temporal rows all the time; what spatial attention needs is exchanged. Base of the modes below.

    What blocks receive is kept under checkpointing, so that recompute sends nothing, unless
    ``recompute_communication`` trades this for memory.
    """

    keeps_received = True

    def shard(self, local: Local, grid: Any) -> Rows:
        return self.held(local(grid).turned())

    def switch(self, local: Local, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        return x, rows

    def segment(self, local: Local, function: Local, rows: Rows, *args: Any, recompute: bool, last: bool) -> Any:
        if recompute and self.keeps_received and not self.options.recompute_communication:
            local = partial(local, context_fn=keep_exchanged)
        return local(function, rows, *args, recompute=recompute, last=last)

    def attend_by_heads(
        self, local: Local, q: Tensor, k: Tensor, v: Tensor, rows: Rows, axis: str, units: str
    ) -> Tensor:
        """Attend along ``axis``, with entries (token, head) dealt out as ``units`` says; q, k, v are ``[R, T, H, D]``.

        ``units`` ends with the axis, so what is received are rows of one head.
        """
        sizes = _axes(rows, h=q.shape[2])
        left = TEMPORAL_ROWS + " h"
        there, back = self.plan(sizes, left, units, q.device), self.plan(sizes, units, left, q.device)
        qkv = exchange(_stacked(q, k, v), there, self.group, kind="heads")
        qkv = qkv.view(-1, sizes[axis], 1, 3, q.shape[3])  # [rows of one head, L, 1, 3, D]
        out = local(*qkv.unbind(3), rows)
        return exchange(out.flatten(0, 2), back, self.group, kind="heads").view(q.shape)


class SplitHeads(TemporalRows):
    """Spatial attention is dealt out by frames x heads: q, k, v there and the output back, 4 u.

    For fewer frames than ranks, where whole spatial rows would leave ranks without work.
    """

    def attend_spatial(self, local: Local, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        return self.attend_by_heads(local, q, k, v, rows, "s", "b t h | s")


class BranchSwitch(TemporalRows):
    """The input of each spatial attention is switched to spatial rows and its output back: 2 u, at N instead of
    N - 1/2 pairs. What travels is a branch, not the residual stream, so it may be rounded (``comm_dtype``)."""

    def spatial(self, local: Local, x: Tensor, rows: Rows) -> Tensor:
        spatial = self.held(rows.turned())
        received = self._exchange(x, rows, TEMPORAL_ROWS, SPATIAL_ROWS)
        out = local(received.unflatten(0, (spatial.count, spatial.length)), spatial)
        return self._exchange(out, rows, SPATIAL_ROWS, TEMPORAL_ROWS).view(x.shape)

    def _exchange(self, x: Tensor, rows: Rows, left: str, entered: str) -> Tensor:
        plan = self.plan(_axes(rows), left, entered, x.device)
        return narrow_exchange(x.flatten(0, 1), plan, self.group, kind="branch", dtype=self.options.comm_dtype)


class Ulysses(TemporalRows):
    """DeepSpeed-Ulysses (Jacobs et al., 2023) at both attentions, a baseline: heads are dealt out and every rank gets
    all tokens of its own; 8 u, and again in recompute. Heads and lengths need not divide."""

    keeps_received = False

    def attend_spatial(self, local: Local, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        return self.attend_by_heads(local, q, k, v, rows, "s", "h | b t s")

    def attend_temporal(self, local: Local, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        return self.attend_by_heads(local, q, k, v, rows, "t", "h | b s t")


class SplitGather(TemporalRows):
    """All tokens are gathered for each attention, a baseline (ColossalAI's split_gather): 2 P u, again in recompute.

    Every rank computes the whole attention and keeps its own rows of it.
    """

    keeps_received = False

    def spatial(self, local: Local, x: Tensor, rows: Rows) -> Tensor:
        samples = rows.grid.num_samples
        everything = self._all(x, rows).unflatten(0, (samples, -1)).transpose(1, 2)  # [B, T, S, C]
        out = local(everything.flatten(0, 1), rows.turned()).unflatten(0, (samples, -1))
        return out.transpose(1, 2).flatten(0, 1)[rows.start : rows.stop]

    def temporal(self, local: Local, x: Tensor, rows: Rows) -> Tensor:
        return local(self._all(x, rows), rows.take(0, rows.total))[rows.start : rows.stop]

    def _all(self, x: Tensor, rows: Rows) -> Tensor:
        return gather_rows(x, run_sizes(rows.total, self.mesh.sp_size), self.group, kind="tokens")


def choose_mode(
    options: Options, shape: tuple[int, int, int], width: int, heads: int, ranks: int
) -> type[WholeSamples]:
    """The mode for batches of ``shape`` (B, T, S)."""
    if options.strategy != "switch":
        return Ulysses if options.strategy == "ulysses" else SplitGather
    if shape[0] % ranks == 0:
        return WholeSamples
    if options.placement == "branch":
        return BranchSwitch
    return SplitHeads if splits_heads(*shape, width, heads, ranks) else SwitchRows


def _axes(rows: Rows, **more: int) -> dict[str, int]:
    grid = rows.grid
    return {"b": grid.num_samples, "t": grid.frames, "s": grid.patches_per_frame, **more}


def _stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three ``[R, L, H, D]`` -> entries ``[R * L * H, 3 * D]``, so that one exchange takes them all."""
    return torch.stack([q, k, v], dim=3).flatten(0, 2).flatten(1)
