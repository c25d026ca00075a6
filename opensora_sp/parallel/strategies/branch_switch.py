"""The input and output of spatial attention switch layout, not the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..batch_shape import BatchShape
from ..collectives import exchange
from ..layout import SPATIAL_ROWS, ExchangePlan
from ..options import Options
from ..protocols import Rows
from ..typed import Local
from .base import BlockLayouts, GridOrShape
from .exchanges import AllToAll, Exchange
from .one_layout import OneLayout


@dataclass(frozen=True)
class PreparedBranch:
    """What the spatial attention of a batch takes, computed before a block, outside of its graph.

    Attributes:
        rows: the spatial rows of this rank.
        there, back: this rank's part in the exchanges before and after.
        precomputed: what the attention takes beside these rows; empty if it computes that itself.
    """

    rows: Rows
    there: ExchangePlan
    back: ExchangePlan
    precomputed: tuple[Any, ...] = ()


class BranchSwitch(OneLayout):
    """Spatial attention's input switches to spatial rows and its output back: 2 u.

    That is one all-to-all more in a model than ``SwitchRows`` needs.
    """

    label = "switch of branches"
    condition = '`placement="branch"`'

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        return options.placement == "branch"

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        return (
            "the config sets placement='branch': spatial attention's input and output switch layout"
        )

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(SPATIAL_ROWS, cls.rows_layout("temporal", grid))

    @classmethod
    def exchanges(cls, shape: BatchShape, options: Options, element_size: int) -> list[Exchange]:
        temporal = cls.rows_layout("temporal", shape)
        token = shape.width * element_size
        return [
            AllToAll(shape.depth, temporal, SPATIAL_ROWS, token),
            AllToAll(shape.depth, SPATIAL_ROWS, temporal, token),
        ]

    def prepare(self, rows: Any, device: torch.device) -> PreparedBranch:
        found = self._prepare_exchanges(rows, device)
        spatial: Any = found.rows
        return replace(found, precomputed=(None, spatial.groups()))

    def spatial(self, local: Local, x: Tensor, rows: Rows, *precomputed: Any) -> Tensor:
        # Outside of a segment nothing is prepared.
        prepared: PreparedBranch = self._prepared or self._prepare_exchanges(rows, x.device)
        spatial = prepared.rows
        received = self._exchange(x.flatten(0, 1), prepared.there)
        tokens = received.unflatten(0, (spatial.count, spatial.length))
        out = local(tokens, spatial, *prepared.precomputed)
        return self._exchange(out.flatten(0, 1), prepared.back).view(x.shape)

    def _prepare_exchanges(self, rows: Rows, device: torch.device) -> PreparedBranch:
        spatial = self.local_rows(rows.transposed())
        own, other = self.layout_of(rows), self.layout_of(spatial)
        return PreparedBranch(
            spatial,
            there=self.plan(rows, own, other, device),
            back=self.plan(spatial, other, own, device),
        )

    def _exchange(self, tokens: Tensor, plan: ExchangePlan) -> Tensor:
        return exchange(tokens, plan, self.group, kind="branch")
