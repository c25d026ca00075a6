"""Attention of windows by windows x heads, for fewer windows than ranks."""

from __future__ import annotations

from ..batch_shape import BatchShape
from ..layout import SPATIAL_ROWS, TEMPORAL_ROWS
from ..options import Options
from .base import BlockLayouts, GridOrShape
from .split_attention import SplitAttention

WINDOW_HEADS = "b w h | p t"


class SplitWindows(SplitAttention):
    """Tokens stay in spatial rows; attention of windows by windows x heads: 4 u."""

    label = "split windows"
    condition = "fewer windows (B*W) than ranks, where it costs less"
    moves = "heads of queries, keys, values and outputs of windows; no whole token"

    resident_layout = "spatial"

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        return few_windows(shape, options, ranks)

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        return few_windows_reason(f"B*W={shape.num_windows} windows", ranks)

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(SPATIAL_ROWS, WINDOW_HEADS)


def few_windows(shape: BatchShape, options: Options, ranks: int) -> bool:
    """Whether windows are fewer than ranks, and cost less when split by heads."""
    if shape.windows is None or shape.num_windows >= ranks:
        return False

    costs = options.cost_model.few_units(
        shape,
        ranks,
        options.link,
        unit=max(shape.windows.sizes) * shape.frames,
        num_units=shape.num_windows,
        row_layout=SPATIAL_ROWS if ranks <= shape.num_frames else TEMPORAL_ROWS,
    )
    return costs.heads_cost_less


def few_windows_reason(few: str, ranks: int) -> str:
    """Why the attention of ``few`` units is split by heads."""
    return (
        f"{few} are fewer than {ranks} ranks: their attention is split by heads as well, which "
        "costs less"
    )
