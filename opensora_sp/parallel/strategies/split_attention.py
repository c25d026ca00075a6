"""Base of the strategies that distribute the heads of an attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch_shape import BatchShape
from ..collectives import exchange
from ..layout import ExchangePlan, unit_ranges
from ..options import Options
from ..protocols import LatentRows, Rows
from ..typed import Local
from .exchanges import AllToAll, Exchange
from .one_layout import OneLayout


@dataclass(frozen=True)
class PreparedHeads:
    """What an attention by heads takes, computed before a block, outside of its graph.

    Attributes:
        rows: those in which tokens attend, each of one head.
        there, back: this rank's part in the exchanges before and after.
        groups: the tokens that attend together.
    """

    rows: Rows
    there: ExchangePlan
    back: ExchangePlan
    groups: Any


class SplitAttention(OneLayout):
    """Queries, keys and values change to the layout of an attention, its output back: 4 u.

    A subclass states the layouts in ``attention_layouts``. An attention whose layout has no axis h
    is local.
    """

    moves = "heads of queries, keys, values and outputs of every attention; no whole token"

    @classmethod
    def exchanges(cls, shape: BatchShape, options: Options, element_size: int) -> list[Exchange]:
        head = shape.width // shape.heads * element_size
        tokens, attention = cls.token_layouts(shape), cls.attention_layouts(shape)

        found: list[Exchange] = []
        for held, attended in shape.of_blocks([*zip(tokens, attention, strict=True)]):
            if has_heads(attended):
                found.append(AllToAll(shape.depth, f"{held} h", attended, 3 * head))  # q, k, v
                found.append(AllToAll(shape.depth, attended, f"{held} h", head))
        return found

    def attend_spatial(self, local: Local, *args: Any) -> Any:
        return self._attend(local, *args, block="spatial")

    def attend_temporal(self, local: Local, *args: Any) -> Any:
        return self._attend(local, *args, block="temporal")

    def _attend(
        self,
        local: Local,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: LatentRows,
        *precomputed: Any,
        block: str,
    ) -> Any:
        """Attend with entries (token, head) in a block's layout; q, k, v are ``[R, L, H, D]``."""
        # Outside of a segment nothing is prepared.
        prepared: PreparedHeads | None = (self._prepared or self.prepare(rows, q.device))[block]
        if prepared is None:
            return local(q, k, v, rows, *precomputed)

        # [R, L, H, 3, D] -> entries [R * L * H, 3 * D], for one exchange.
        qkv = torch.stack([q, k, v], dim=3).flatten(0, 2).flatten(1)
        qkv = exchange(qkv, prepared.there, self.group, kind="heads")
        qkv = qkv.view(-1, prepared.rows.length, 1, 3, q.shape[3])  # [rows of one head, L, 1, 3, D]
        out = local(*qkv.unbind(3), prepared.rows, prepared.groups)
        return exchange(out.flatten(0, 2), prepared.back, self.group, kind="heads").view(q.shape)

    def prepare(self, rows: LatentRows, device: torch.device) -> dict[str, PreparedHeads | None]:
        """By the block whose attention it is; None for an attention that is local."""
        layouts = self.attention_layouts(rows.grid)
        return {
            block: self._prepare_exchanges(rows, layout, device) if has_heads(layout) else None
            for block, layout in (("spatial", layouts.spatial), ("temporal", layouts.temporal))
        }

    def _prepare_exchanges(
        self, rows: LatentRows, layout: str, device: torch.device
    ) -> PreparedHeads:
        held = f"{self.layout_of(rows)} h"
        there = self.plan(rows, held, layout, device)
        back = self.plan(rows, layout, held, device)

        # The last axis of the layout is the one that tokens of a row differ in.
        attended = "spatial" if layout.endswith("s") else "temporal"
        rows = rows if rows.layout == attended else rows.transposed()
        units = None if rows.are_sequences else self.local_units(rows, layout)
        return PreparedHeads(rows, there, back, rows.groups(units))

    def local_units(self, rows: Rows, layout: str) -> list[int]:
        """Numbers of the samples, rows or windows that attend here, in order, once per head."""
        held = unit_ranges(self.axes(rows), layout, self.mesh.sp_size)
        numbers = range(*held[self.mesh.sp_rank])
        if layout.startswith("h |"):  # every unit of the batch for each head
            return [*range(_num_units(rows))] * len(numbers)
        return [number // self.heads for number in numbers]


def has_heads(layout: str) -> bool:
    """Whether entries of a layout are single heads of tokens."""
    return "h" in layout.split()


def _num_units(rows: Rows) -> int:
    """Samples, rows or windows of a whole batch that attend each by itself."""
    if rows.grid.full:
        return rows.grid.num_samples
    if rows.layout == "spatial" or rows.grid.windows is None:
        return rows.total
    return rows.grid.num_samples * len(rows.grid.windows.sizes)
