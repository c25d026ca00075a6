"""Base of the strategies whose tokens stay in one layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..collectives import keep_exchanged
from ..options import Options
from ..protocols import Rows
from ..typed import Local
from .base import BlockLayouts, GridOrShape, Strategy


class OneLayout(Strategy):
    """Tokens stay in one layout; what an attention needs in the other is exchanged.

    Under checkpointing the tensors that blocks receive are kept, so that recompute sends nothing,
    unless ``recompute_communication`` trades this for memory.
    """

    resident_layout = "temporal"
    keeps_received = True

    _prepared: Any = None  # of the segment that runs

    @classmethod
    def token_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        held = cls.rows_layout(cls.resident_layout, grid)
        return BlockLayouts(held, held)

    @classmethod
    def resends(cls, options: Options) -> bool:
        return options.recompute_communication or not cls.keeps_received

    def boundary_rows(self, rows: Rows) -> tuple[Rows, ...]:
        return (rows if rows.layout == self.resident_layout else rows.transposed(),)

    def switch(self, local: Local, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        return x, rows

    def segment(
        self,
        local: Local,
        function: Local,
        rows: Any,
        *args: Any,
        recompute: bool,
        **options: Any,
    ) -> Any:
        if recompute and not self.resends(self.options):
            options["context_fn"] = keep_exchanged
        prepared = self.prepare(rows, args[0].device)

        def started(*args: Any) -> Any:
            self._prepared = prepared
            try:
                return function(*args)
            finally:
                self._prepared = None

        return local(started, rows, *args, recompute=recompute, **options)

    def prepare(self, rows: Any, device: torch.device) -> Any:
        """What the blocks of a segment need: plans of exchanges, and the rows that attend.

        It is computed before the blocks, so that no compiled graph traces it.
        """
        return None
