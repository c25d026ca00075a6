"""The interface of a parallel strategy: its declarations, and its methods for hook points.

A strategy divides the tokens of one batch among the ranks of a sequence-parallel group. From a
shape alone, its class declares which rank holds which tokens, which tokens attend to each other
there, and what is sent: ``applies``, ``reason``, ``token_layouts``, ``attention_layouts``,
``exchanges``. The planner, the command line and the docs use these declarations. Its instances
have one method for each kind of hook point; it gets the local function of that point (``local``)
and the point's arguments.

A new strategy is one subclass, passed to ``register_strategy``.

Legend: B samples, T frames, S patches, C width, H heads, D = C / H, P ranks, R rows held, L tokens
of a row. Volumes are elements sent per rank for a spatial and a temporal block, forward, in ``u =
(P-1)/P * B*T*S*C/P``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

from opensora_sp.common.graphs import uncompiled

from ..batch_shape import BatchShape
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
from ..protocols import Grid, Rows
from ..typed import Local
from .exchanges import Exchange

GridOrShape: TypeAlias = Grid | BatchShape
REPLICATED = "replicated"  # in place of a layout: every rank attends to all tokens of the batch


class BlockLayouts(NamedTuple):
    """Layouts (``parallel/layout.py``), or ``REPLICATED``, of a spatial and of a temporal block."""

    spatial: str
    temporal: str


class Strategy:
    """Rows distributed in each layout, and nothing sent. Base of all strategies.

    ``label`` names it to users. ``option`` is the value of ``sequence_parallel.strategy`` under
    which it is chosen, where its ``condition`` holds. ``moves`` is what its exchanges carry, None
    where whole tokens change layout.

    Args:
        mesh: this rank's place in the group that shares the batch: ``sp_size``, ``sp_rank``,
            ``sp_group``.
        options: those of ``parallelize``, with a number of chunks.
        heads: H.
    """

    label: str
    option = "switch"
    condition = "always"
    moves: str | None = None

    window_rows = WINDOW_ROWS  # layout of temporal rows where there are windows

    def __init__(self, mesh: SequenceGroup, options: Options, heads: int) -> None:
        self.mesh, self.options, self.heads = mesh, options, heads

    # Declarations: from a shape alone, on any machine.

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        """Whether it is chosen for this shape on 2 or more ranks, given its ``option``."""
        return True

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        """Why it was chosen, in one line for the user."""
        return f"the config sets strategy={cls.option!r}, {cls.condition}"

    @classmethod
    def rows_layout(cls, layout: str, grid: GridOrShape) -> str:
        """How all "spatial" or "temporal" rows are distributed to the ranks."""
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
        """What one forward pass sends, in a dtype of ``element_size`` bytes."""
        return []

    @classmethod
    def resends(cls, options: Options) -> bool:
        """Whether recomputation under gradient checkpointing sends everything again."""
        return False

    # Methods of hook points: what ranks do with tensors.

    def boundary_rows(self, rows: Rows) -> tuple[Rows, ...]:
        """The rows where tokens enter and where they leave, given all spatial rows; one element if
        both are the same.
        """
        return rows, rows.transposed()

    def shard(self, local: Local, grid: Grid) -> Rows:
        return self.local_rows(self.boundary_rows(local(grid))[0])

    def _local(self, local: Local, *args: Any, **options: Any) -> Any:
        return local(*args, **options)

    # switch(local, x, rows) -> x and its rows in the other layout, x ``[R, L, C]``
    # spatial, temporal(local, x, rows, *precomputed) -> x; ``precomputed`` is of these rows, and
    #     computed anew where it is left out
    # attend_spatial, attend_temporal(local, q, k, v, rows, *precomputed) -> output; all
    #     ``[R, L, H, D]``
    # segment(local, function, rows, *args, recompute, last) -> what the function returns
    # tokenwise(local, function, rows, tokens, entries, part) -> what the function returns
    switch = spatial = temporal = attend_spatial = attend_temporal = segment = tokenwise = _local

    # Which rows this rank holds, and its part in an exchange.

    def layout_of(self, rows: Rows) -> str:
        """How rows are distributed to the ranks."""
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
        entries = rank_ranges(self.axes(rows), self.layout_of(rows), self.mesh.sp_size)
        return [(start // rows.length, stop // rows.length) for start, stop in entries]

    def row_counts(self, rows: Rows) -> list[int]:
        """How many rows each rank holds of all rows of a layout."""
        return [stop - start for start, stop in self.row_ranges(rows)]

    def local_rows(self, rows: Rows) -> Rows:
        """This rank's range of all rows of a layout."""
        return rows.take(*self.row_ranges(rows)[self.mesh.sp_rank])

    @uncompiled  # plans are cached: they belong to no graph
    def plan(self, rows: Rows, source: str, target: str, device: torch.device) -> ExchangePlan:
        """This rank's part in an exchange of tokens, or of heads, of the rows' whole batch."""
        ranks, rank = self.mesh.sp_size, self.mesh.sp_rank
        return plan_exchange(self.axes(rows), source, target, ranks, rank, device)

    @property
    def group(self) -> Any:
        return self.mesh.sp_group
