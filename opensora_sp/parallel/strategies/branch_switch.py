"""The input and output of spatial attention switch layout, not the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..batch_shape import BatchShape
from ..collectives import exchange
from ..layout import SPATIAL_ROWS, ExchangePlan
from ..low_precision import bytes_per_token, low_precision_exchange
from ..options import Options
from ..protocols import Rows
from ..typed import Local
from .base import BlockLayouts, GridOrShape
from .exchanges import AllToAll, Exchange
from .one_layout import OneLayout


@dataclass(frozen=True)
class Ahead:
    """What the spatial attention of a batch takes, found before a block: it belongs to no graph.

    Attributes:
        rows: the spatial rows of this rank.
        there, back: this rank's part in the exchanges before and after.
        of_rows: what the attention takes beside these rows, if not all is found where it runs.
    """

    rows: Rows
    there: ExchangePlan
    back: ExchangePlan
    of_rows: tuple[Any, ...] = ()


class BranchSwitch(OneLayout):
    """Spatial attention's input switches to spatial rows and its output back: 2 u.

    That is one all-to-all more in a model than ``SwitchRows`` needs. What is sent is a branch, not
    the residual stream, so it may be rounded (``comm_dtype``).
    """

    label = "switch of branches"
    condition = '`placement="branch"`'

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        return options.placement == "branch"

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        sent = f", sent as {options.comm_dtype}" if options.comm_dtype else ""
        return (
            "the config sets placement='branch': spatial attention's input and output switch "
            f"layout{sent}"
        )

    @classmethod
    def attention_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(SPATIAL_ROWS, cls.rows_layout("temporal", grid))

    @classmethod
    def exchanges(cls, shape: BatchShape, options: Options, element_size: int) -> list[Exchange]:
        temporal = cls.rows_layout("temporal", shape)
        token = bytes_per_token(shape.width, element_size, options.comm_dtype)
        return [
            AllToAll(shape.depth, temporal, SPATIAL_ROWS, token),
            AllToAll(shape.depth, SPATIAL_ROWS, temporal, token),
        ]

    def look_ahead(self, rows: Any, device: torch.device) -> Ahead:
        found = self._found(rows, device)
        spatial: Any = found.rows
        return replace(found, of_rows=(None, spatial.groups()))

    def spatial(self, local: Local, x: Tensor, rows: Rows, *of_rows: Any) -> Tensor:
        # Outside of a segment nothing is known ahead.
        ahead: Ahead = self._ahead or self._found(rows, x.device)
        spatial = ahead.rows
        received = self._exchange(x.flatten(0, 1), ahead.there)
        tokens = received.unflatten(0, (spatial.count, spatial.length))
        out = local(tokens, spatial, *ahead.of_rows)
        return self._exchange(out.flatten(0, 1), ahead.back).view(x.shape)

    def _found(self, rows: Rows, device: torch.device) -> Ahead:
        spatial = self.local_rows(rows.transposed())
        own, other = self.layout_of(rows), self.layout_of(spatial)
        return Ahead(
            spatial,
            there=self.plan(rows, own, other, device),
            back=self.plan(spatial, other, own, device),
        )

    def _exchange(self, tokens: Tensor, plan: ExchangePlan) -> Tensor:
        if self.options.comm_dtype is None:
            return exchange(tokens, plan, self.group, kind="branch")
        return low_precision_exchange(
            tokens, plan, self.group, kind="branch", dtype=self.options.comm_dtype
        )
