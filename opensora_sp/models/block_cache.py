"""Residual of a model's blocks, kept from one sampling step for the next ones."""

from __future__ import annotations

from torch import Tensor


class BlockCache:
    """The output of all blocks minus their input, of the local rows where tokens leave the blocks.

    An argument of a model's ``forward``; who calls it sets ``keeps`` and ``reuses`` before.

    Attributes:
        keeps: run the blocks, and keep their residual.
        reuses: add the residual to the blocks' input instead of running the blocks.
        residual: ``[R, L, C]``, of the last call that kept it. It stays on the rank that has made
            it.
    """

    def __init__(self) -> None:
        self.keeps = self.reuses = False
        self.residual: Tensor | None = None

    @property
    def shared_form(self) -> str:
        """The description that must be equal on the ranks that share a batch."""
        return f"BlockCache that keeps {self.keeps}, reuses {self.reuses}"
