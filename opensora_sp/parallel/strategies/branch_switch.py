"""The input and output of spatial attention switch layout, not the residual stream."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..batch_shape import BatchShape
from ..layout import SPATIAL_ROWS
from ..low_precision import bytes_per_token, low_precision_exchange
from ..options import Options
from ..protocols import Rows
from ..typed import Local
from .base import BlockLayouts, GridOrShape
from .exchanges import AllToAll, Exchange
from .one_layout import OneLayout


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

    def spatial(self, local: Local, x: Tensor, rows: Rows, *of_rows: Any) -> Tensor:
        spatial = self.local_rows(rows.transposed())
        received = self._exchange(x, rows, spatial)
        out = local(received.unflatten(0, (spatial.count, spatial.length)), spatial)
        return self._exchange(out, spatial, rows).view(x.shape)

    def _exchange(self, x: Tensor, source: Rows, target: Rows) -> Tensor:
        plan = self.plan(source, self.layout_of(source), self.layout_of(target), x.device)
        return low_precision_exchange(
            x.flatten(0, 1), plan, self.group, kind="branch", dtype=self.options.comm_dtype
        )
