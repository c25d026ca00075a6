"""Spatial attention by frames x heads, for fewer frames than ranks."""

from __future__ import annotations

from ..batch_shape import BatchShape
from ..options import Options
from .base import BlockLayouts, GridOrShape
from .split_attention import SplitAttention
from .switch_rows import few_frames_costs, few_frames_reason

FRAME_HEADS = "b t h | s"


class SplitHeads(SplitAttention):
    """Spatial attention by frames x heads: 4 u.

    For fewer frames than ranks, where whole spatial rows would leave ranks without work.
    """

    label = "split heads"
    condition = "fewer frames (B*T) than ranks, where it costs less"
    moves = "heads of queries, keys, values and outputs of spatial attention; no whole token"

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
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
