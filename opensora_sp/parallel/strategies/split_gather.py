"""All tokens on all ranks for each attention, a baseline."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..batch_shape import BatchShape
from ..collectives import gather_rows
from ..layout import WINDOW_COLUMNS
from ..options import Options
from ..protocols import Rows
from ..typed import Local
from .base import REPLICATED, BlockLayouts, GridOrShape
from .exchanges import AllGather, Exchange
from .one_layout import OneLayout


class SplitGather(OneLayout):
    """All tokens are gathered for each attention: 2 P u, and again in recompute.

    ColossalAI's split_gather. Every rank computes the whole attention and keeps its own rows of it.
    """

    label = option = "split_gather"
    condition = "a baseline that sends more than 'switch'"
    moves = "all tokens to all ranks, for every attention"

    keeps_received = False
    window_rows = WINDOW_COLUMNS

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(REPLICATED, REPLICATED)

    @classmethod
    def exchanges(cls, shape: BatchShape, options: Options, element_size: int) -> list[Exchange]:
        held = cls.rows_layout("temporal", shape)
        blocks = 2 * shape.depth if shape.alternates else shape.depth
        return [AllGather(blocks, held, shape.width * element_size)]

    def spatial(self, local: Local, x: Tensor, rows: Rows, *precomputed: Any) -> Tensor:
        everything, frames = rows.take(0, rows.total).transpose(self._all(x, rows))  # [B * T, S, C]
        out, _ = frames.transpose(local(everything, frames))
        return out[rows.start : rows.stop]

    def temporal(self, local: Local, x: Tensor, rows: Rows, *precomputed: Any) -> Tensor:
        out: Tensor = local(self._all(x, rows), rows.take(0, rows.total))
        return out[rows.start : rows.stop]

    def _all(self, x: Tensor, rows: Rows) -> Tensor:
        return gather_rows(x, self.row_counts(rows), self.group, kind="tokens")
