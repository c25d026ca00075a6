"""Protocols of the engine: what it uses of a model's description of its rows and of the grid that
they lie in.

``models/token_layout.py`` implements them for latents, ``module_points.py`` for the tokens of any
other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .layout import Partition


class Grid(Protocol):
    """The patches of a batch: B samples of T frames of S patches.

    ``full``: all tokens of a sample attend together.
    """

    num_samples: int
    full: bool
    shape: tuple[int, int, int]
    frames: int
    patches_per_frame: int
    windows: Partition | None

    def rows(self, layout: str) -> Rows: ...


class Rows(Protocol):
    """Rows ``[start, stop)`` of a layout, "spatial" or "temporal", each of ``length`` tokens."""

    grid: Grid
    layout: str
    start: int
    stop: int
    length: int
    total: int
    count: int

    def take(self, start: int, stop: int) -> Rows: ...
    def transposed(self) -> Rows: ...
    def transpose(self, x: Tensor) -> tuple[Tensor, Rows]: ...


class LatentGrid(Grid, Protocol):
    """A grid of patches of latents."""

    patch_volume: int


class LatentRows(Rows, Protocol):
    """Rows that know their place in the latents of the batch."""

    grid: LatentGrid
    are_sequences: bool

    def groups(self, units: Sequence[int] | None = None) -> Any: ...
    def transposed(self) -> LatentRows: ...
    def slice(self, z: Tensor) -> Tensor: ...
    def samples(self, device: torch.device) -> Tensor: ...
    def inside(self, device: torch.device) -> Tensor: ...
