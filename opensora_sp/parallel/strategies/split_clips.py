"""Full attention over the tokens of a clip, by samples x heads."""

from __future__ import annotations

from ..batch_shape import BatchShape
from ..options import Options
from .base import BlockLayouts, GridOrShape
from .split_attention import SplitAttention

CLIP_HEADS = "b h | s t"


class SplitClips(SplitAttention):
    """Full attention over the tokens of a clip by samples x heads: 4 u for each attention."""

    label = "split clips"
    condition = "full attention over clips"

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
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
