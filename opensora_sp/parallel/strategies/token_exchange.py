"""Strategies that send whole tokens for an attention: to all ranks, or to its layout and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..batch_shape import BatchShape, Rows
from ..collectives import exchange, gather_rows
from ..layout import SPATIAL_ROWS, WINDOW_COLUMNS, ExchangePlan
from ..options import Options
from .strategy import (
    REPLICATED,
    AllGather,
    AllToAll,
    AttentionFn,
    Block,
    BlockLayouts,
    Exchange,
    GridOrShape,
    OneLayout,
)


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
        resident = cls.rows_layout("temporal", shape)
        blocks = 2 * shape.depth if shape.alternates else shape.depth
        return [AllGather(blocks, resident, shape.width * element_size)]

    def self_attention(
        self, local: AttentionFn, x: Tensor, rows: Rows, precomputed: Any, block: Block
    ) -> Tensor:
        all_rows = rows.take(0, rows.total)
        tokens = gather_rows(x, self.row_counts(rows), self.member.sp_group, kind="tokens")
        # Tokens lie in temporal rows.
        if block == "temporal":
            return local(tokens, all_rows, None)[rows.start : rows.stop]

        # Every rank computes all rows: nothing of the attention is split.
        tokens, frames = all_rows.transpose(tokens)  # [B * T, S, C]
        out, _ = frames.transpose(local(tokens, frames, None))
        return out[rows.start : rows.stop]


class BranchSwitch(OneLayout):
    """Spatial attention's input switches to spatial rows and its output back: 2 u.

    For a ``ShardPlan`` whose attentions are branches. It sends one all-to-all more in a model than
    ``SwitchRows``.
    """

    label = "switch of branches"
    condition = "a ShardPlan whose attentions are branches"

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(SPATIAL_ROWS, cls.rows_layout("temporal", grid))

    @classmethod
    def exchanges(cls, shape: BatchShape, options: Options, element_size: int) -> list[Exchange]:
        temporal = cls.rows_layout("temporal", shape)
        there = AllToAll(shape.depth, temporal, SPATIAL_ROWS, shape.width * element_size)
        return [there, replace(there, source=SPATIAL_ROWS, target=temporal)]

    def self_attention(
        self, local: AttentionFn, x: Tensor, rows: Rows, precomputed: Any, block: Block
    ) -> Tensor:
        if block == "temporal":
            return local(x, rows, precomputed)

        frames = self.local_rows(rows.transposed())
        there = self._plan(rows, frames, x.device)
        tokens = exchange(x.flatten(0, 1), there, self.member.sp_group, kind="branch")
        out = local(tokens.unflatten(0, (frames.count, frames.length)), frames, None)
        back = self._plan(frames, rows, x.device)
        return exchange(out.flatten(0, 1), back, self.member.sp_group, kind="branch").view(x.shape)

    def _plan(self, rows: Rows, target: Rows, device: torch.device) -> ExchangePlan:
        return self.plan(rows, self.layout_of(rows), self.layout_of(target), device)
