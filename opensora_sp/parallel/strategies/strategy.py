"""The interface of a parallel strategy: its declarations, and its methods for hook points.

A strategy divides the tokens of one batch among the ranks of a sequence-parallel group. From a
shape alone, its class declares which rank holds which tokens, which tokens attend to each other
there, and which exchanges follow: ``applies``, ``reason``, ``token_layouts``,
``attention_layouts``, ``exchanges``. The planner, the command line and the docs use these
declarations. Its instances have one method for each kind of hook point. It gets the function of
that point on one rank (``local``) and the point's arguments.

A new strategy is one subclass, passed to ``register_strategy``.

Legend: B samples, T frames, S patches, C width, H heads, D = C / H, P ranks, R local rows, L tokens
of a row. Volumes are elements sent per rank for a spatial and a temporal block, forward, in ``u =
(P-1)/P * B*T*S*C/P``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from opensora_sp.common.graphs import uncompiled

from ..batch_shape import BatchShape, Grid, Rows
from ..collectives import keep_exchanged
from ..layout import (
    SPATIAL_ROWS,
    TEMPORAL_ROWS,
    WINDOW_ROWS,
    BatchAxes,
    ExchangePlan,
    Range,
    plan_exchange,
    rank_ranges,
)
from ..mesh import SequenceGroup
from ..options import Options

GridOrShape: TypeAlias = Grid | BatchShape
Block: TypeAlias = Literal["spatial", "temporal"]
# In place of a layout: every rank attends to all tokens of the batch.
REPLICATED = "replicated"


class BlockLayouts(NamedTuple):
    """Layouts (``parallel/layout.py``), or ``REPLICATED``, of a spatial and of a temporal block."""

    spatial: str
    temporal: str


class BytesSent(NamedTuple):
    """Bytes that each rank sends to others."""

    forward: list[int]
    backward: list[int]


class Exchange(Protocol):
    """A collective of a forward pass and its adjoint of the backward pass."""

    def sent(self, shape: BatchShape, ranks: int) -> BytesSent: ...

    def estimate(self, shape: BatchShape, ranks: int) -> float:
        """About the bytes that the busiest rank sends in one direction, without planning."""
        return float(max(self.sent(shape, ranks).forward))


@dataclass(frozen=True)
class AllToAll(Exchange):
    """``count`` exchanges of all entries from one layout to another; backward, in reverse."""

    count: int
    source: str
    target: str
    entry_bytes: int

    def sent(self, shape: BatchShape, ranks: int) -> BytesSent:
        forward, backward = [], []
        for rank in range(ranks):
            plan = plan_exchange(shape.axes, self.source, self.target, ranks, rank, "cpu")
            received = sum(plan.recv_splits) - plan.recv_splits[rank]
            forward.append(self.count * self.entry_bytes * plan.sent_elsewhere(rank))
            backward.append(self.count * self.entry_bytes * received)

        return BytesSent(forward, backward)

    def estimate(self, shape: BatchShape, ranks: int) -> float:
        # A rank keeps its share of its entries.
        entries = max(shape.entries(self.source, ranks))
        return self.count * self.entry_bytes * entries * (ranks - 1) / ranks


@dataclass(frozen=True)
class AllGather(Exchange):
    """``count`` gathers of all entries on every rank; backward, their gradients are sent back."""

    count: int
    layout: str
    entry_bytes: int

    def sent(self, shape: BatchShape, ranks: int) -> BytesSent:
        local_entries = shape.entries(self.layout, ranks)
        entry_bytes = self.count * self.entry_bytes
        return BytesSent(
            forward=[entries * (ranks - 1) * entry_bytes for entries in local_entries],
            backward=[(sum(local_entries) - entries) * entry_bytes for entries in local_entries],
        )


# Of ``local``, the function of a hook point on one rank (``models/hook_points.py``).
ShardFn: TypeAlias = Callable[[Grid], Rows]
SwitchFn: TypeAlias = Callable[[Tensor, Rows], tuple[Tensor, Rows]]
# The last argument, if not None, is what a caller has computed of the rows.
AttentionFn: TypeAlias = Callable[[Tensor, Rows, Any], Tensor]
AttendFn: TypeAlias = Callable[[Tensor, Tensor, Tensor, Rows, Any], Tensor]

Function: TypeAlias = Callable[..., Tensor]
Tensors: TypeAlias = Sequence[Tensor]


class Strategy:
    """Rows distributed in each layout, and nothing sent. Base of all strategies.

    ``label`` names it to users. ``option`` is the value of ``sequence_parallel.strategy`` under
    which it is chosen, where its ``condition`` holds. ``moves`` is what its exchanges carry, None
    where whole tokens change layout.

    Args:
        member: this rank's place in the group that shares the batch: ``sp_size``, ``sp_rank``,
            ``sp_group``.
        options: of ``parallelize``, with a number of chunks.
        heads: H.
    """

    label: str
    option = "switch"
    condition = "always"
    moves: str | None = None

    # Layout of temporal rows where there are windows.
    window_rows = WINDOW_ROWS

    def __init__(self, member: SequenceGroup, options: Options, heads: int) -> None:
        self.member, self.options, self.heads = member, options, heads

    # Declarations: from a shape alone, on any machine.

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        """True if it is chosen for this shape on 2 or more ranks, given its ``option``."""
        return True

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        """The reason of the choice, in one line for the user."""
        return f"the config sets strategy={cls.option!r}, {cls.condition}"

    @classmethod
    def rows_layout(cls, layout: str, grid: GridOrShape) -> str:
        """The layout in which all "spatial" or "temporal" rows are distributed to the ranks."""
        if layout == "spatial":
            return SPATIAL_ROWS
        return TEMPORAL_ROWS if grid.windows is None else cls.window_rows

    @classmethod
    def token_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        """The layouts in which tokens are held."""
        return BlockLayouts(cls.rows_layout("spatial", grid), cls.rows_layout("temporal", grid))

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        """The layouts in which tokens attend."""
        return cls.token_layouts(grid)

    @classmethod
    def exchanges(cls, shape: BatchShape, options: Options, element_size: int) -> list[Exchange]:
        """The exchanges of one forward pass, in a dtype of ``element_size`` bytes."""
        return []

    @classmethod
    def resends(cls, options: Options) -> bool:
        """True if recomputation under gradient checkpointing sends everything again."""
        return False

    # Methods of hook points, on tensors.

    def boundary_rows(self, rows: Rows) -> tuple[Rows, ...]:
        """The rows where tokens enter and where they leave; one element if both are the same."""
        return rows, rows.transposed()

    def shard(self, local: ShardFn, grid: Grid) -> Rows:
        """The local rows where tokens enter."""
        return self.local_rows(self.boundary_rows(local(grid))[0])

    def switch(self, local: SwitchFn, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """Tokens ``[R, L, C]`` in the other layout, and their rows."""
        return local(x, rows)

    def self_attention(
        self, local: AttentionFn, x: Tensor, rows: Rows, precomputed: Any, block: Block
    ) -> Tensor:
        """The self-attention of a block, ``[R, L, C]`` -> ``[R, L, C]``.

        ``precomputed`` belongs to these rows: pass it on with these only; for other rows pass None.
        """
        return local(x, rows, precomputed)

    def attend(
        self,
        local: AttendFn,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        groups: Any,
        block: Block,
    ) -> Tensor:
        """The attention inside of ``self_attention``, all ``[R, L, H, D]``.

        ``groups`` are the tokens of these rows that attend together; None to find them.
        """
        return local(q, k, v, rows, groups)

    def segment(
        self, local: Function, work: Function, rows: Rows, *args: Any, recompute: Any, last: bool
    ) -> Tensor:
        """A part of a model between two switches, ``work(*args)``, perhaps checkpointed.

        ``last``: no switch follows. ``local`` takes the same arguments, and ``context_fn`` of
        ``torch.utils.checkpoint.checkpoint``.
        """
        return local(work, rows, *args, recompute=recompute, last=last)

    def tokenwise(
        self, function: Function, rows: Rows, tokens: Tensors, entries: Tensors, part: Any
    ) -> Tensor:
        """The end of a segment, ``function(*tokens, *entries, part)``, on single tokens."""
        return function(*tokens, *entries, part)

    # Which rows this rank holds, and its part in an exchange.

    def layout_of(self, rows: Rows) -> str:
        """The layout in which rows are distributed to the ranks."""
        return self.rows_layout(rows.layout, rows.grid)

    def axes(self, rows: Rows) -> BatchAxes:
        """Sizes of the axes of the rows' whole batch."""
        grid = rows.grid
        return BatchAxes(
            grid.num_samples, grid.frames, grid.patches_per_frame, self.heads, grid.windows
        )

    @uncompiled
    def row_ranges(self, rows: Rows) -> list[Range]:
        """The rows ``[start, stop)`` that each rank holds of all rows of a layout."""
        entries = rank_ranges(self.axes(rows), self.layout_of(rows), self.member.sp_size)
        return [(start // rows.length, stop // rows.length) for start, stop in entries]

    def row_counts(self, rows: Rows) -> list[int]:
        """The number of rows that each rank holds of all rows of a layout."""
        return [stop - start for start, stop in self.row_ranges(rows)]

    def local_rows(self, rows: Rows) -> Rows:
        """This rank's range of all rows of a layout."""
        return rows.take(*self.row_ranges(rows)[self.member.sp_rank])

    # Plans are cached: they belong to no graph.
    @uncompiled
    def plan(self, rows: Rows, source: str, target: str, device: torch.device) -> ExchangePlan:
        """This rank's part in an exchange of tokens, or of heads, of the rows' whole batch."""
        ranks, rank = self.member.sp_size, self.member.sp_rank
        return plan_exchange(self.axes(rows), source, target, ranks, rank, device)


class OneLayout(Strategy):
    """Tokens stay in one layout; what an attention needs in the other is exchanged.

    Under checkpointing the tensors that blocks receive are kept, so that recompute sends nothing,
    unless ``recompute_communication`` trades this for memory.
    """

    resident_layout = "temporal"
    keeps_received = True

    @classmethod
    def token_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        resident = cls.rows_layout(cls.resident_layout, grid)
        return BlockLayouts(resident, resident)

    @classmethod
    def resends(cls, options: Options) -> bool:
        return options.recompute_communication or not cls.keeps_received

    def boundary_rows(self, rows: Rows) -> tuple[Rows, ...]:
        return (rows if rows.layout == self.resident_layout else rows.transposed(),)

    def switch(self, local: SwitchFn, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        return x, rows

    def segment(
        self, local: Function, work: Function, rows: Rows, *args: Any, recompute: Any, last: bool
    ) -> Tensor:
        # Exchanges lie inside of the recomputed part, which would send everything again.
        if recompute and not self.resends(self.options):
            local = partial(local, context_fn=keep_exchanged)
        return local(work, rows, *args, recompute=recompute, last=last)
