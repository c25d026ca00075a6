"""The size of a batch: its patches and rows, as the engine reads them, and its shape, by which a
parallel strategy is chosen.

``models/token_layout.py`` implements ``Grid`` and ``Rows`` for latents, ``module_points.py`` for
the tokens of any other model.

Legend: B samples, T frames, S patches of a frame, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .layout import BatchAxes, Partition, rank_ranges

Stated = TypeVar("Stated")


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


def alternates(config: Any) -> bool:
    """True if a model of this config has temporal blocks as well as spatial ones; most have."""
    return getattr(config, "alternates", True)


@dataclass(frozen=True)
class BatchShape:
    """B x T x S tokens in a model of ``depth`` pairs of a spatial and a temporal block.

    A model that does not alternate has ``depth`` spatial blocks alone.
    """

    num_samples: int
    frames: int
    patches: int
    width: int
    heads: int
    depth: int = 1
    windows: Partition | None = None  # of temporal attention
    # All tokens of a sample attend to each other.
    full: bool = False
    alternates: bool = True

    @classmethod
    def of(cls, config: Any, num_samples: int, latent_size: tuple[int, int, int]) -> BatchShape:
        """The shape of a batch of latents ``(frames, height, width)`` in a model of this config."""
        grid = config.grid(num_samples, latent_size)
        return cls.of_grid(
            grid, config.hidden_size, config.num_heads, config.depth, alternates=alternates(config)
        )

    @classmethod
    def of_grid(
        cls, grid: Grid, width: int, heads: int, depth: int = 1, *, alternates: bool = True
    ) -> BatchShape:
        """The shape of the patches ``grid``."""
        return cls(
            num_samples=grid.num_samples,
            frames=grid.frames,
            patches=grid.patches_per_frame,
            width=width,
            heads=heads,
            depth=depth,
            windows=grid.windows,
            full=grid.full,
            alternates=alternates,
        )

    def of_blocks(self, pair: Sequence[Stated]) -> Sequence[Stated]:
        """The entries of a (spatial, temporal) pair that the model has blocks for."""
        return pair if self.alternates else pair[:1]

    @property
    def tokens(self) -> int:
        return self.num_samples * self.frames * self.patches

    @property
    def num_frames(self) -> int:
        """B*T, frames of all samples."""
        return self.num_samples * self.frames

    @property
    def num_windows(self) -> int:
        """B*W, windows of all samples; 0 where temporal attention stays within a patch."""
        return 0 if self.windows is None else self.num_samples * len(self.windows.sizes)

    @property
    def axes(self) -> BatchAxes:
        """The axes of a layout."""
        return BatchAxes(self.num_samples, self.frames, self.patches, self.heads, self.windows)

    def entries(self, layout: str, ranks: int) -> list[int]:
        """Tokens, or heads of tokens, that each rank holds in a layout."""
        return [stop - start for start, stop in rank_ranges(self.axes, layout, ranks)]
