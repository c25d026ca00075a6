"""Protocols of the engine: what it uses of a model's description of its rows and of the grid that
they lie in.

``models/token_layout.py`` implements them for latents, ``module_points.py`` for the tokens of any
other model.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .layout import Partition


class Grid(Protocol):
    """The patches of a batch: B samples of T frames of S patches.

    ``full``: all tokens of a sample attend together.
    """

    @property
    def num_samples(self) -> int: ...
    @property
    def full(self) -> bool: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def frames(self) -> int: ...
    @property
    def patches_per_frame(self) -> int: ...
    @property
    def windows(self) -> Partition | None: ...
    def rows(self, layout: str) -> Rows: ...


class Rows(Protocol):
    """Rows ``[start, stop)`` of a layout, "spatial" or "temporal", each of ``length`` tokens."""

    @property
    def grid(self) -> Grid: ...
    @property
    def layout(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def count(self) -> int: ...
    def take(self, start: int, stop: int) -> Rows: ...
    def transposed(self) -> Rows: ...
    def transpose(self, x: Tensor) -> tuple[Tensor, Rows]: ...


class LatentGrid(Grid, Protocol):
    """A grid of patches of latents."""

    @property
    def patch_volume(self) -> int: ...


class LatentRows(Rows, Protocol):
    """Rows that know their place in the latents of the batch."""

    @property
    def grid(self) -> LatentGrid: ...
    def slice(self, z: Tensor) -> Tensor: ...
    def samples(self, device: torch.device) -> Tensor: ...
    def inside(self, device: torch.device) -> Tensor: ...
