"""The tokens that attend to each other: rows, windows of patches or whole clips.

Where clips of different sizes share a batch, only the tokens inside of a clip take part.

Tokens of a group lie next to each other, so the lengths of the groups, host integers, describe them
all. Tokens outside of their clip are excluded by an index of the others. So no tensor here is
larger than one number per token.

Legend: B samples, T frames of patches, H x W patches per frame, S = H * W, R local rows, L tokens
of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .packing import Packing

if TYPE_CHECKING:
    from .token_layout import Rows


@dataclass(frozen=True, eq=False)
class Windows:
    """A partition of a frame's patches into windows, which attend through all frames.

    The windows at the lower and right border may be smaller.
    """

    order: tuple[int, ...]  # the patches, window by window
    sizes: tuple[int, ...]  # patches of each window


@lru_cache(maxsize=256)
def windows_of(height: int, width: int, kernel: tuple[int, int]) -> Windows:
    """Windows of ``kernel`` patches, -1 for all, on ``height`` x ``width`` patches.

    The same object every time.
    """
    lines, columns = (n if k < 0 else k for n, k in zip((height, width), kernel, strict=True))

    def window(patch: int) -> tuple[int, int]:
        return patch // width // lines, patch % width // columns

    # Sorting is stable, so patches stay line by line within a window.
    order = sorted(range(height * width), key=window)
    return Windows(tuple(order), tuple(Counter(map(window, order)).values()))


@dataclass(frozen=True, eq=False)
class VideoMask:
    """The latent positions inside of each clip, where clips of different sizes share a batch."""

    positions: Tensor  # bool [B, frames, height, width]
    patch_size: tuple[int, int, int]

    def frame_sizes(self) -> list[tuple[int, int]]:
        """Height and width of each clip in patches, at least 1: its last line and column inside."""
        _, ph, pw = self.patch_size
        heights, widths = self._last_inside(dim=2), self._last_inside(dim=1)
        sizes = zip(heights, widths, strict=True)
        return [(max(1, -(-h // ph)), max(1, -(-w // pw))) for h, w in sizes]

    def _last_inside(self, dim: int) -> list[int]:
        """1 + the last line (``dim`` 2 reduced) or column inside of each clip, 0 without any."""
        inside = self.positions.any(dim=1).any(dim=dim)  # [B, height] or [B, width]
        numbers = torch.arange(1, inside.shape[1] + 1, device=inside.device)
        return (inside * numbers).amax(1).tolist()


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of tokens, next to each other in their order, that attend to each other.

    ``lengths`` are the tokens of each group. With an ``index``, int64, the tokens are those at
    these places, and the others take no part.
    """

    lengths: Sequence[int]
    index: Tensor | None = None

    @cached_property
    def packing(self) -> Packing:
        """The lengths for attention; made once, for all blocks."""
        return Packing(self.lengths, self.lengths)


def group_tokens(rows: Rows, units: Sequence[int] | None) -> Groups | None:
    """See ``Rows.groups``."""
    grid, edges = rows.grid, _unit_edges(rows)
    are_rows = len(edges) == rows.total + 1
    if grid.mask is None and are_rows:
        return None
    if units is None:
        units = range(*torch.searchsorted(edges, torch.tensor([rows.start, rows.stop])).tolist())
    if grid.mask is None or not units:
        return Groups((edges.diff() * rows.length)[list(units)].tolist())

    # Which tokens of the units, from the first to the last, are inside of their clip.
    first, last = min(units), max(units) + 1
    start, stop = edges[[first, last]].tolist()
    inside = rows.take(start, stop).inside(torch.device("cpu")).any(-1).flatten()

    # How many these are in each of the units.
    starts = (edges[first : last + 1] - start) * rows.length
    counts = F.pad(inside.cumsum(0), (1, 0))[starts].diff()
    if are_rows and inside.all():
        return None

    # The units as they are passed: in another order, perhaps more than once.
    if not isinstance(units, range):
        tokens = inside.split(starts.diff().tolist())
        inside = torch.cat([tokens[unit - first] for unit in units])
    index = inside.nonzero().flatten().to(grid.mask.positions.device)
    lengths = counts[torch.tensor(units) - first]
    return Groups(lengths[lengths > 0].tolist(), index)


def _unit_edges(rows: Rows) -> Tensor:
    """The first row of each unit of the batch, and the end, int64 ``[units + 1]``.

    Units are the rows, windows or samples that attend each by itself.
    """
    grid, starts = rows.grid, torch.arange(rows.per_sample)  # of the units of a sample
    if grid.full:
        starts = starts[:1]
    elif rows.layout == "temporal" and grid.windows is not None:
        sizes = torch.tensor(grid.windows.sizes)
        starts = sizes.cumsum(0) - sizes

    samples = torch.arange(grid.num_samples)[:, None] * rows.per_sample
    return F.pad((samples + starts).flatten(), (0, 1), value=rows.total)
