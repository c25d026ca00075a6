"""Which tokens attend to each other: rows, windows of patches, whole clips, and of these the tokens inside of a clip.

Tokens that attend to each other lie next to each other, so their lengths, host integers, say it all; tokens that lie
outside of their clip are left out by an index of the others. Nothing here is larger than one number per token.

Legend: B samples, T frames of patches, H x W patches per frame, S = H * W, R rows held, L tokens of a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opensora_sp.transfer import to_device

from .packing import Packing

if TYPE_CHECKING:
    from .token_layout import Rows


@dataclass(frozen=True, eq=False)
class Windows:
    """A division of a frame's patches into windows; those at the lower and right border may be smaller."""

    order: tuple[int, ...]  # the patches, window by window
    sizes: tuple[int, ...]  # of the windows

    def order_on(self, device: torch.device) -> Tensor:
        """The patch at each place of the windows, int64 ``[S]``."""
        return to_device(torch.tensor(self.order), device)

    def place_on(self, device: torch.device) -> Tensor:
        """The place of each patch in the windows, int64 ``[S]``."""
        return to_device(torch.tensor(self.order).argsort(), device)


@lru_cache(maxsize=256)
def windows_of(height: int, width: int, kernel: tuple[int, int]) -> Windows:
    """Windows of ``kernel`` patches, -1 for all, on ``height`` x ``width`` patches. The same object every time."""
    line, column = (size if k < 0 else k for size, k in zip((height, width), kernel, strict=True))
    windows = [
        [
            y * width + x
            for y in range(top, min(top + line, height))
            for x in range(left, min(left + column, width))
        ]
        for top in range(0, height, line)
        for left in range(0, width, column)
    ]
    return Windows(
        order=tuple(patch for one in windows for patch in one), sizes=tuple(map(len, windows))
    )


@dataclass(frozen=True, eq=False)
class VideoMask:
    """Which latent positions of a batch lie inside of their clip, where clips of different sizes share it."""

    positions: Tensor  # bool [B, frames, height, width]
    patch_size: tuple[int, int, int]

    def frame_sizes(self) -> list[tuple[int, int]]:
        """Height and width of each clip in patches, at least 1: the lines and columns that reach inside of it."""
        _, ph, pw = self.patch_size
        used = [self.positions.any(dim=1).any(dim=dim) for dim in (2, 1)]  # [B, height], [B, width]
        ends = [
            (one * torch.arange(1, one.shape[1] + 1, device=one.device)).amax(1).tolist()
            for one in used
        ]
        return [(max(1, -(-h // ph)), max(1, -(-w // pw))) for h, w in zip(*ends, strict=True)]


@dataclass(frozen=True, eq=False)
class Groups:
    """Tokens in the order in which they lie, ``lengths`` of them after each other attending to each other.

    With an ``index`` the tokens are those at these places, int64, and the others take no part.
    """

    lengths: Sequence[int]
    index: Tensor | None = None

    @cached_property
    def packing(self) -> Packing:
        """What attention takes; made once, for all blocks."""
        return Packing(self.lengths, self.lengths)


def group_tokens(rows: Rows, units: Sequence[int] | None) -> Groups | None:
    """See ``Rows.groups``."""
    grid, places = rows.grid, _Units(rows)
    if grid.mask is None and places.are_rows:
        return None
    units = places.held() if units is None else units
    if grid.mask is None or not units:
        return Groups([places.size(unit) for unit in units])
    first, last = min(units), max(units) + 1
    held = rows.take(places.first_row(first), places.first_row(last))
    inside = held.inside(torch.device("cpu")).any(-1).flatten()  # of each token
    edges = [
        (places.first_row(unit) - places.first_row(first)) * rows.length
        for unit in range(first, last + 1)
    ]
    lengths = (
        torch.nn.functional.pad(inside.cumsum(0), (1, 0))[edges].diff().tolist()
    )  # of units first to last
    if places.are_rows and sum(lengths) == len(inside):
        return None
    if not isinstance(units, range):
        inside = torch.cat(
            [inside[edges[unit - first] : edges[unit - first + 1]] for unit in units]
        )
    index = inside.nonzero().flatten().to(grid.mask.positions.device)
    return Groups([n for n in (lengths[unit - first] for unit in units) if n], index)


class _Units:
    """What attends together in a layout: rows, windows or samples, numbered sample by sample."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        if rows.grid.full:
            self.starts: Sequence[int] = [0]  # first rows of the units of a sample
        elif rows.layout == "temporal" and rows.grid.windows is not None:
            self.starts = [0, *accumulate(rows.grid.windows.sizes[:-1])]
        else:
            self.starts = range(rows.per_sample)

    @property
    def are_rows(self) -> bool:
        return isinstance(self.starts, range)

    def held(self) -> range:
        """Those that the rows held make up, whole."""
        edges = self.rows.start, self.rows.stop
        first, last = (
            sample * len(self.starts) + bisect_right(self.starts, row) - 1
            for sample, row in (divmod(edge, self.rows.per_sample) for edge in edges)
        )
        assert (self.first_row(first), self.first_row(last)) == edges, self.rows
        return range(first, last)

    def first_row(self, unit: int) -> int:
        sample, number = divmod(unit, len(self.starts))
        return sample * self.rows.per_sample + self.starts[number]

    def size(self, unit: int) -> int:
        """Tokens of a unit."""
        return (self.first_row(unit + 1) - self.first_row(unit)) * self.rows.length
