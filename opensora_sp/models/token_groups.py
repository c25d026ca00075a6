"""The tokens that attend to each other: rows, windows of patches or whole clips.

Where clips of different sizes share a batch, only the tokens inside of a clip take part.

Tokens of a group lie next to each other, so the lengths of the groups, host integers, describe them
all. Tokens outside of their clip are excluded by an index of the others. So no tensor here is
larger than one number per token.

Legend: B samples, T frames of patches, H x W patches per frame, S = H * W, R local rows, L tokens
of a row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from opensora_sp.common.tensors import to_device

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

    positions: Tensor  # bool [B, frames, height, width], on the device of the latents
    patch_size: tuple[int, int, int]
    on_host: Tensor  # the same on the CPU, where tokens are counted

    @classmethod
    def of(cls, mask: Tensor, patch_size: tuple[int, int, int], device: torch.device) -> VideoMask:
        """A mask for latents on ``device``. One that is not on the CPU is read back."""
        return cls(to_device(mask, device), patch_size, mask.cpu())

    def on(self, device: torch.device) -> Tensor:
        """``positions`` on the device of the latents or on the CPU."""
        return self.on_host if device.type == "cpu" else self.positions

    def frame_sizes(self) -> list[tuple[int, int]]:
        """Height and width of each clip in patches, at least 1: its last line and column inside."""
        _, ph, pw = self.patch_size
        heights, widths = self._last_inside(dim=2), self._last_inside(dim=1)
        sizes = zip(heights, widths, strict=True)
        return [(max(1, -(-h // ph)), max(1, -(-w // pw))) for h, w in sizes]

    def _last_inside(self, dim: int) -> list[int]:
        """1 + the last line (``dim`` 2 reduced) or column inside of each clip, 0 without any."""
        inside = self.on_host.any(dim=1).any(dim=dim)  # [B, height] or [B, width]
        numbers = torch.arange(1, inside.shape[1] + 1)
        return (inside * numbers).amax(1).tolist()


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of tokens, next to each other in their order, that attend to each other.

    ``packing`` has the tokens of each group. With an ``index``, int64, the tokens are those at
    these places, and the others take no part. ``are_rows``: each row attends to itself, all of it.
    """

    # Not as a list: compiled code would be compiled again for each number of groups.
    packing: Packing
    index: Tensor | None = None
    are_rows: bool = False

    @classmethod
    def of(cls, lengths: Sequence[int], index: Tensor | None = None) -> Groups:
        """Groups of these numbers of tokens."""
        return cls(Packing(lengths, lengths), index)

    @property
    def lengths(self) -> Sequence[int]:
        """The tokens of each group."""
        return self.packing.queries


ROWS = Groups(Packing([], []), are_rows=True)


def holds_whole_units(rows: Rows) -> bool:
    """Whether rows begin and end with a unit (``group_tokens``), so that they attend alone."""
    starts = _unit_starts(rows)
    return all(edge % rows.per_sample in starts for edge in (rows.start, rows.stop))


def group_tokens(rows: Rows, units: Sequence[int] | None) -> Groups:
    """See ``Rows.groups``."""
    grid, starts = rows.grid, _unit_starts(rows)
    are_rows = len(starts) == rows.per_sample
    if grid.mask is None and are_rows:
        return ROWS

    def first_row(unit: int) -> int:
        sample, number = divmod(unit, len(starts))
        return sample * rows.per_sample + starts[number]

    def unit_at(row: int) -> int:
        sample, number = divmod(row, rows.per_sample)
        return sample * len(starts) + bisect_left(starts, number)

    if units is None:
        units = range(unit_at(rows.start), unit_at(rows.stop))
        ends = first_row(units.start), first_row(units.stop)
        assert ends == (rows.start, rows.stop), "local rows begin and end with a unit"
    if grid.mask is None or not units:
        return Groups.of([(first_row(unit + 1) - first_row(unit)) * rows.length for unit in units])

    # Which tokens of the units, from the first to the last, are inside of their clip.
    first, last = min(units), max(units) + 1
    start, stop = first_row(first), first_row(last)
    inside = rows.take(start, stop).inside(torch.device("cpu")).any(-1).flatten()

    # How many these are in each of the units.
    edges = [(first_row(unit) - start) * rows.length for unit in range(first, last + 1)]
    counts = F.pad(inside.cumsum(0), (1, 0))[edges].diff().tolist()
    if are_rows and sum(counts) == len(inside):
        return ROWS

    # The units as they are passed: in another order, perhaps more than once.
    if not isinstance(units, range):
        inside = torch.cat([inside[edges[i] : edges[i + 1]] for i in (u - first for u in units)])
    index = to_device(inside.nonzero().flatten(), grid.mask.positions.device)
    lengths = [counts[unit - first] for unit in units]
    return Groups.of([length for length in lengths if length], index)


def _unit_starts(rows: Rows) -> Sequence[int]:
    """The first row of each unit of a sample: of the rows, windows or samples that attend alone."""
    if rows.grid.full:
        return [0]
    if rows.layout == "temporal" and rows.grid.windows is not None:
        return [0, *accumulate(rows.grid.windows.sizes[:-1])]
    return range(rows.per_sample)
