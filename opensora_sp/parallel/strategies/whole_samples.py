"""Whole samples on each rank."""

from __future__ import annotations

from ..batch_shape import BatchShape
from ..options import Options
from .base import BlockLayouts, GridOrShape, Strategy

SAMPLES = "b | t s"


class WholeSamples(Strategy):
    """Every rank holds whole samples, in both layouts, so nothing is sent."""

    label = "whole samples"
    condition = "P divides B"
    moves = "no token"

    @classmethod
    def applies(cls, shape: BatchShape, options: Options, ranks: int) -> bool:
        return shape.num_samples % ranks == 0

    @classmethod
    def reason(cls, shape: BatchShape, options: Options, ranks: int) -> str:
        if ranks == 1:
            return "sp_size is 1: one rank holds the whole batch, nothing is sent"
        B = shape.num_samples
        return f"{ranks} ranks divide B={B}: each holds {B // ranks} whole samples, no token moves"

    @classmethod
    def token_layouts(cls, grid: GridOrShape) -> BlockLayouts:
        return BlockLayouts(SAMPLES, SAMPLES)
