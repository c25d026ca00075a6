"""What the engine asks of a model's own description of its rows and of the grid of patches that they lie in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .layout import Partition


class Grid(Protocol):
    """The patches of a batch: B samples of T frames of S patches. ``full``: all tokens of a sample attend together."""

    num_samples: int
    full: bool

    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def frames(self) -> int: ...
    @property
    def patches_per_frame(self) -> int: ...
    @property
    def patch_volume(self) -> int: ...
    @property
    def windows(self) -> Partition | None: ...
    def rows(self, layout: str) -> Rows: ...


class Rows(Protocol):
    """The rows ``[start, stop)`` of all rows of a layout, "spatial" or "temporal", each of ``length`` tokens."""

    grid: Grid
    layout: str
    start: int
    stop: int

    @property
    def length(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def count(self) -> int: ...
    def take(self, start: int, stop: int) -> Rows: ...
    def turned(self) -> Rows: ...
    def turn(self, x: Tensor) -> tuple[Tensor, Rows]: ...
    def slice(self, z: Tensor) -> Tensor: ...
    def samples(self, device: torch.device) -> Tensor: ...
    def inside(self, device: torch.device) -> Tensor: ...
