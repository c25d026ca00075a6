"""Base of the strategies whose tokens stay in one layout."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from ..collectives import keep_exchanged
from ..options import Options
from ..protocols import Rows
from .base import BlockLayouts, GridOrShape, Local, Strategy


class OneLayout(Strategy):
    """Tokens stay in one layout; what an attention needs in the other is exchanged.

    Under checkpointing the tensors that blocks receive are kept, so that recompute sends nothing,
    unless ``recompute_communication`` trades this for memory.
    """

    stays: ClassVar[str] = "temporal"
    keeps_received: ClassVar[bool] = True

    @classmethod
    def token_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        held = cls.rows_layout(cls.stays, grid)
        return BlockLayouts(held, held)

    @classmethod
    def resends(cls, options: Options) -> bool:
        return options.recompute_communication or not cls.keeps_received

    def ends(self, rows: Rows) -> tuple[Rows, ...]:
        return (rows if rows.layout == self.stays else rows.transposed(),)

    def switch(
        self, local: Local[tuple[Tensor, Rows]], x: Tensor, rows: Rows
    ) -> tuple[Tensor, Rows]:
        return x, rows

    def segment(
        self,
        local: Local[Any],
        function: Local[Any],
        rows: Rows,
        *args: Any,
        recompute: bool,
        last: bool,
    ) -> Any:
        if recompute and not self.resends(self.options):
            local = partial(local, context_fn=keep_exchanged)
        return local(function, rows, *args, recompute=recompute, last=last)
