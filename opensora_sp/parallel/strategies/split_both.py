"""Both attentions by heads, for fewer windows and fewer frames than ranks."""

from __future__ import annotations

from ..batch_shape import BatchShape
from ..layout import WINDOW_COLUMNS
from ..options import Options
from .base import BlockLayouts, GridOrShape
from .split_attention import SplitAttention
from .split_heads import FRAME_HEADS
from .split_windows import WINDOW_HEADS, few_windows, few_windows_reason


class SplitBoth(SplitAttention):
    """Spatial attention by frames x heads, that of windows by windows x heads: 8 u."""

    label = "split both"
    condition = "fewer windows (B*W) and fewer frames (B*T) than ranks, where it costs less"

    window_rows = WINDOW_COLUMNS

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        return shape.num_frames < ranks and few_windows(shape, options, ranks)

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        few = f"B*W={shape.num_windows} windows and B*T={shape.num_frames} frames"
        return few_windows_reason(few, ranks)

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(FRAME_HEADS, WINDOW_HEADS)
