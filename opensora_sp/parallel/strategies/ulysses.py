"""DeepSpeed-Ulysses, a baseline."""

from __future__ import annotations

from ..layout import WINDOW_COLUMNS
from .base import BlockLayouts, GridOrShape
from .split_attention import SplitAttention


class Ulysses(SplitAttention):
    """DeepSpeed-Ulysses (Jacobs et al., 2023) at both attentions: 8 u, and again in recompute.

    Heads are distributed, and every rank gets all tokens of its heads. Heads and lengths need not
    divide.
    """

    label = option = "ulysses"
    condition = "a baseline that sends more than 'switch'"

    keeps_received = False
    window_rows = WINDOW_COLUMNS

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts("h | b t s", "h | b s t" if grid.windows is None else "h | b w p t")
