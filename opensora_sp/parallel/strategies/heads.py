"""Strategies that distribute the heads of an attention, for few frames, few windows or clips.

With fewer frames or windows than ranks, whole units leave ranks without work. Heads of an attention
can be distributed instead, which sends queries, keys, values and outputs. The cost model decides.

Legend: B samples, T frames, W windows of a frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch_shape import BatchShape, LatentRows, Rows
from ..collectives import exchange
from ..cost_model import ELEMENT_BYTES, block_flops
from ..layout import SPATIAL_ROWS, TEMPORAL_ROWS, WINDOW_COLUMNS, ExchangePlan, unit_ranges
from ..options import Options
from .strategy import (
    AllToAll,
    AttendFn,
    Block,
    BlockLayouts,
    Exchange,
    Function,
    GridOrShape,
    OneLayout,
)

FRAME_HEADS = "b t h | s"
WINDOW_HEADS = "b w h | p t"
CLIP_HEADS = "b h | s t"


@dataclass(frozen=True)
class FewUnitsCosts:
    """Seconds of a block with its exchanges on the busiest rank, in two ways to attend.

    ``whole`` gives whole units to some ranks and none to the others, and switches. ``heads``
    distributes all token-local work, splits the attention alone, and exchanges four activations.
    """

    whole: float
    heads: float

    @property
    def heads_cost_less(self) -> bool:
        return self.heads < self.whole


def few_units_costs(
    shape: BatchShape,
    options: Options,
    ranks: int,
    *,
    unit: int,
    num_units: int,
    row_layout: str,
    switches: int = 2,
) -> FewUnitsCosts:
    """Cost of a block where units are fewer than ranks.

    Args:
        unit: tokens of the largest unit, a frame or a window.
        num_units: how many there are, all samples together.
        row_layout: how tokens are distributed where attention is split by heads.
        switches: exchanges of a block whose units are whole.
    """
    model, link = options.cost_model, options.link
    width, heads = shape.width, shape.heads
    sent = (ranks - 1) / ranks * width * ELEMENT_BYTES
    local_tokens = max(shape.entries(row_layout, ranks))
    # Units of one head on the busiest rank.
    head_units = -(-num_units * heads // ranks)

    def compute(tokens: int, head_units: int) -> float:
        attention = model.attention(head_units, unit, unit, width // heads)
        return block_flops(tokens, width) / model.flops + attention

    return FewUnitsCosts(
        whole=compute(unit, heads) + link.seconds(switches * sent * unit, exchanges=switches),
        heads=compute(local_tokens, head_units)
        + link.seconds(4 * sent * local_tokens, exchanges=2),
    )


def few_frames_costs(shape: BatchShape, options: Options, ranks: int) -> FewUnitsCosts:
    """Cost of a spatial block by whole frames, and by frames x heads."""
    return few_units_costs(
        shape,
        options,
        ranks,
        unit=shape.patches,
        num_units=shape.num_frames,
        row_layout=TEMPORAL_ROWS,
        # Without temporal blocks, tokens stay in spatial rows.
        switches=2 if shape.alternates else 0,
    )


def few_frames_reason(shape: BatchShape, options: Options, ranks: int, choice: str) -> str:
    """The reason of a choice for fewer frames than ranks."""
    costs = few_frames_costs(shape, options, ranks)
    return (
        f"B*T={shape.num_frames} frames are fewer than {ranks} ranks: {choice}, "
        f"which costs less ({costs.whole * 1e6:.3g} us a spatial block by whole frames, "
        f"{costs.heads * 1e6:.3g} us by frames x heads)"
    )


@dataclass(frozen=True)
class PreparedHeads:
    """The plans of an attention by heads, made before a block, outside of its graph.

    Attributes:
        rows: the rows in which tokens attend, each of one head.
        there, back: this rank's part in the exchanges before and after.
        groups: the tokens that attend together.
    """

    rows: Rows
    there: ExchangePlan
    back: ExchangePlan
    groups: Any


Prepared = Mapping[str, PreparedHeads | None]


class SplitAttention(OneLayout):
    """Queries, keys and values change to the layout of an attention, its output back: 4 u.

    A subclass states the layouts in ``attention_layouts``. An attention whose layout has no axis h
    is local.
    """

    moves = "heads of queries, keys, values and outputs of every attention; no whole token"

    _prepared: Prepared | None = None  # while a segment runs

    @classmethod
    def exchanges(cls, shape: BatchShape, options: Options, element_size: int) -> list[Exchange]:
        head = shape.width // shape.heads * element_size
        layouts = zip(cls.token_layouts(shape), cls.attention_layouts(shape), strict=True)

        exchanges: list[Exchange] = []
        for resident, attended in shape.of_blocks([*layouts]):
            if has_heads(attended):
                qkv = AllToAll(shape.depth, f"{resident} h", attended, 3 * head)
                out = AllToAll(shape.depth, attended, f"{resident} h", head)
                exchanges += [qkv, out]
        return exchanges

    def segment(
        self, local: Function, part: Function, rows: Any, *args: Any, recompute: Any, last: bool
    ) -> Tensor:
        # Before the block, so that no compiled graph traces it.
        prepared = self.prepare(rows, args[0].device)

        def run(*args: Any) -> Tensor:
            self._prepared = prepared
            try:
                return part(*args)
            finally:
                self._prepared = None

        return super().segment(local, run, rows, *args, recompute=recompute, last=last)

    def attend(
        self, local: AttendFn, q: Tensor, k: Tensor, v: Tensor, rows: Any, groups: Any, block: Block
    ) -> Tensor:
        # Outside of a segment nothing is prepared.
        prepared = (self._prepared or self.prepare(rows, q.device))[block]
        if prepared is None:
            return local(q, k, v, rows, groups)

        # [R, L, H, 3, D] -> entries [R * L * H, 3 * D], for one exchange.
        qkv = torch.stack([q, k, v], dim=3).flatten(0, 2).flatten(1)
        qkv = exchange(qkv, prepared.there, self.member.sp_group, kind="heads")
        qkv = qkv.view(-1, prepared.rows.length, 1, 3, q.shape[3])  # [rows of one head, L, 1, 3, D]
        q_heads, k_heads, v_heads = qkv.unbind(3)
        out = local(q_heads, k_heads, v_heads, prepared.rows, prepared.groups)
        out = exchange(out.flatten(0, 2), prepared.back, self.member.sp_group, kind="heads")
        return out.view(q.shape)

    def prepare(self, rows: LatentRows, device: torch.device) -> Prepared:
        """The plans of each block's attention; None for an attention that is local."""
        layouts = self.attention_layouts(rows.grid)
        return {
            block: self._prepare_exchanges(rows, layout, device) if has_heads(layout) else None
            for block, layout in (("spatial", layouts.spatial), ("temporal", layouts.temporal))
        }

    def _prepare_exchanges(
        self, rows: LatentRows, layout: str, device: torch.device
    ) -> PreparedHeads:
        # Entries of the exchange are single heads of tokens.
        resident = f"{self.layout_of(rows)} h"
        there = self.plan(rows, resident, layout, device)
        back = self.plan(rows, layout, resident, device)

        # The last axis of the layout is the one that tokens of a row differ in.
        attended = "spatial" if layout.endswith("s") else "temporal"
        rows = rows if rows.layout == attended else rows.transposed()
        # Rows of equal length need no list of units.
        units = None if rows.are_sequences else self.local_units(rows, layout)
        return PreparedHeads(rows, there, back, rows.groups(units))

    def local_units(self, rows: Rows, layout: str) -> list[int]:
        """Numbers of the samples, rows or windows that attend here, in order, once per head."""
        ranges = unit_ranges(self.axes(rows), layout, self.member.sp_size)
        numbers = range(*ranges[self.member.sp_rank])
        # Every unit of the batch for each head.
        if layout.startswith("h |"):
            return [*range(_num_units(rows))] * len(numbers)
        return [number // self.heads for number in numbers]


class SplitHeads(SplitAttention):
    """Spatial attention by frames x heads: 4 u.

    For fewer frames than ranks, where whole spatial rows would leave ranks without work.
    """

    label = "split heads"
    condition = "fewer frames (B*T) than ranks, where it costs less"
    moves = "heads of queries, keys, values and outputs of spatial attention; no whole token"

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        # With enough frames every rank has whole rows, and a switch sends half as much.
        if shape.num_frames >= ranks:
            return False
        return few_frames_costs(shape, options, ranks).heads_cost_less

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        choice = "spatial attention is split by frames x heads"
        return few_frames_reason(shape, options, ranks, choice)

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(FRAME_HEADS, cls.rows_layout("temporal", grid))


class SplitWindows(SplitAttention):
    """Tokens stay in spatial rows; attention of windows by windows x heads: 4 u."""

    label = "split windows"
    condition = "fewer windows (B*W) than ranks, enough frames, where it costs less"
    moves = "heads of queries, keys, values and outputs of windows; no whole token"

    # Enough frames mean that spatial attention is local in this layout; only windows are few.
    resident_layout = "spatial"

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        if shape.windows is None or shape.num_windows >= ranks or shape.num_frames < ranks:
            return False

        costs = few_units_costs(
            shape,
            options,
            ranks,
            unit=max(shape.windows.sizes) * shape.frames,
            num_units=shape.num_windows,
            row_layout=SPATIAL_ROWS,
        )
        return costs.heads_cost_less

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        return (
            f"B*W={shape.num_windows} windows are fewer than {ranks} ranks: their attention is "
            "split by heads as well, which costs less"
        )

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(SPATIAL_ROWS, WINDOW_HEADS)


class SplitClips(SplitAttention):
    """Full attention over the tokens of a clip by samples x heads: 4 u for each attention."""

    label = "split clips"
    condition = "full attention over clips"

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        # Whatever the shape: all tokens of a clip attend together, so no distribution of rows keeps
        # an attention local.
        return shape.full

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        return (
            f"full attention over clips is distributed by B*H={shape.num_samples * shape.heads} "
            "heads of clips; all else by temporal rows"
        )

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(CLIP_HEADS, CLIP_HEADS)


class Ulysses(SplitAttention):
    """DeepSpeed-Ulysses (Jacobs et al., 2023) at both attentions: 8 u, and again in recompute.

    A baseline. Heads are distributed, and every rank gets all tokens of its heads. Heads and
    lengths need not divide.
    """

    label = option = "ulysses"
    condition = "a baseline that sends more than 'switch'"

    keeps_received = False
    window_rows = WINDOW_COLUMNS

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts("h | b t s", "h | b s t" if grid.windows is None else "h | b w p t")


def has_heads(layout: str) -> bool:
    """True if entries of a layout are single heads of tokens."""
    return "h" in layout.split()


def _num_units(rows: Rows) -> int:
    """Samples, rows or windows of a whole batch that attend each by itself."""
    if rows.grid.full:
        return rows.grid.num_samples
    if rows.layout == "spatial" or rows.grid.windows is None:
        return rows.total
    return rows.grid.num_samples * len(rows.grid.windows.sizes)
