"""Where a token lives: the grid of patches of a batch, and the rows of one layout.

A latent video is cut into patches, and each patch becomes a token. STDiT alternates attention over
the patches of one frame with attention over the frames of one patch. So its tokens are kept in
rows, each of which is one attention sequence, in one of two layouts:

* spatial layout: one row per (sample, frame), ``S`` patches long;
* temporal layout: one row per (sample, patch), ``T`` frames long.

For a sample of T = 2 frames of S = 3 patches, where 12 is patch 2 of frame 1::

    spatial rows            temporal rows
    frame 0:  00 01 02      patch 0:  00 10
    frame 1:  10 11 12      patch 1:  01 11
                            patch 2:  02 12

``PatchGrid`` describes all patches of a batch. ``Rows`` is a contiguous range of its rows in one
layout: the rows of a tensor. The bare model holds all rows; under sequence parallelism each
rank holds a range. ``Rows.slice`` cuts the patches of these rows out of a latent,
``Rows.transpose`` brings tokens into the other layout, and ``unpatchify`` makes a latent of them
again.

Where temporal attention goes over windows of patches through all frames, temporal rows lie in the
order of the windows. ``Rows.groups`` has the tokens that attend to each other (``packing.py``).

Legend: B samples, T frames of patches, H x W patches per frame, S = H * W, R local rows, L row
length (S or T), c channels of a latent, (pt, ph, pw) patch size, V = pt * ph * pw patch volume.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from opensora_sp.common.graphs import uncompiled
from opensora_sp.common.tensors import to_device

from .attention_table import Backend
from .functions import take
from .packing import ROWS, Groups, VideoMask, Windows, windows_of

SPATIAL = "spatial"
TEMPORAL = "temporal"


class _Cache:
    """Results shared by all blocks of a batch.

    Kept in an object, not a bare dict: torch.compile guards on a dict's contents, and entries
    added from block to block would recompile each block.
    """

    def __init__(self) -> None:
        self.entries: dict[Any, Any] = {}


@dataclass(frozen=True)
class PatchGrid:
    """The patches of a batch of latents ``[B, c, frames, height, width]``.

    Latents are padded at the end up to a whole patch.

    Args:
        latent_size: (frames, height, width) of the latents.
        patch_size: (pt, ph, pw).
        kernel: height and width of the windows of temporal attention, in patches (-1 for all).
        full: all tokens of a sample attend to each other.
        mask: the positions inside of each clip, where clips of different sizes share the batch.
        scale: what positions are divided by, ``[]`` or, with a mask, ``[B]``.
        attention: the backend of each kind of attention in the batch; models resolve them before
            their blocks.
    """

    num_samples: int
    latent_size: tuple[int, int, int]
    patch_size: tuple[int, int, int]
    kernel: tuple[int, int] | None = None
    full: bool = False
    mask: VideoMask | None = field(default=None, compare=False)
    scale: Tensor | None = field(default=None, compare=False)
    attention: Mapping[str, Backend] = field(default_factory=dict, compare=False)
    _cache: _Cache = field(default_factory=_Cache, compare=False, repr=False)  # see ``cached``

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of patches along time, height and width: (T, H, W)."""
        sizes = zip(self.latent_size, self.patch_size, strict=True)
        t, h, w = (-(-size // patch) for size, patch in sizes)
        return t, h, w

    @property
    def frames(self) -> int:
        """T, frames of patches."""
        return self.shape[0]

    @property
    def patches_per_frame(self) -> int:
        """S = H * W."""
        return self.shape[1] * self.shape[2]

    @property
    def patch_volume(self) -> int:
        """V, latent positions in one patch."""
        return math.prod(self.patch_size)

    @cached_property
    def windows(self) -> Windows | None:
        """The windows of a frame; None if temporal attention stays within a patch."""
        return None if self.kernel is None else windows_of(*self.shape[1:], self.kernel)

    def cached(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """The result of ``compute``, computed once for this batch and shared by all blocks."""
        entries = self._cache.entries
        if key not in entries:
            entries[key] = compute()
        return entries[key]

    @property
    def known_groups(self) -> list[Groups]:
        """The groups of tokens that were found so far."""
        return [entry for entry in self._cache.entries.values() if isinstance(entry, Groups)]

    # Inside of a graph, the cache would be guarded.
    @uncompiled
    def window_order(self, device: torch.device, *, inverse: bool = False) -> Tensor:
        """The patches window by window, or the permutation back to line by line: int64 ``[S]``."""
        if inverse:
            return self.cached(("inverse", device), lambda: self.window_order(device).argsort())
        assert self.windows is not None
        order = self.windows.order
        return self.cached(("order", device), lambda: to_device(torch.tensor(order), device))

    def rows(self, layout: str) -> Rows:
        """All rows of the batch in one layout."""
        rows = Rows(grid=self, layout=layout, start=0, stop=0)
        return rows.take(0, rows.total)


@dataclass(frozen=True)
class Rows:
    """The range ``[start, stop)`` of a batch's rows in one layout, counted sample by sample."""

    grid: PatchGrid
    layout: str
    start: int
    stop: int

    @property
    def per_sample(self) -> int:
        """Rows of one sample: T in the spatial layout, S in the temporal one."""
        return self.grid.frames if self.layout == SPATIAL else self.grid.patches_per_frame

    @property
    def length(self) -> int:
        """L, tokens of one row: S in the spatial layout, T in the temporal one."""
        return self.grid.patches_per_frame if self.layout == SPATIAL else self.grid.frames

    @property
    def total(self) -> int:
        """Rows of the whole batch, local or not."""
        return self.grid.num_samples * self.per_sample

    @property
    def count(self) -> int:
        """R, number of local rows; may be zero."""
        return self.stop - self.start

    def take(self, start: int, stop: int) -> Rows:
        """The range ``[start, stop)`` of the same batch in the same layout."""
        return replace(self, start=start, stop=stop)

    def transposed(self) -> Rows:
        """All rows of the same batch in the other layout."""
        return self.grid.rows(TEMPORAL if self.layout == SPATIAL else SPATIAL)

    def sample_ranges(self) -> Iterator[tuple[int, int, int]]:
        """``(sample, lo, hi)``: the local rows of each sample, numbered within the sample.

        Yields one empty range if there are none, so that all callers take the same code path.
        """
        if not self.count:
            yield 0, 0, 0

        for sample in range(self.start // self.per_sample, -(-self.stop // self.per_sample)):
            first = sample * self.per_sample
            lo, hi = max(self.start - first, 0), min(self.stop - first, self.per_sample)
            if lo < hi:
                yield sample, lo, hi

    def tokens_per_sample(self, frames: Sequence[int] | None = None) -> list[int]:
        """Local tokens of each of the B samples, or of these frames of them, as host integers."""
        frames = range(self.grid.frames) if frames is None else frames
        tokens = [0] * self.grid.num_samples
        for sample, lo, hi in self.sample_ranges():
            if self.layout == SPATIAL:
                tokens[sample] = sum(lo <= frame < hi for frame in frames) * self.length
            else:
                tokens[sample] = (hi - lo) * len(frames)
        return tokens

    def expand_to_rows(self, values: Tensor) -> Tensor:
        """Expand per-sample values ``[B, 1 or per_sample, 1 or L, ...]`` to the local rows.

        Returns:
            ``[b, 1 or n, 1 or L, ...]``, to be broadcast against the local tokens,
            ``[b, n, L, ...]``: b samples of n rows if all samples are whole, else b = 1. A view,
            unless there are unequal parts of several samples.

        The backward of a broadcast is a reduction, which accumulates bf16 in fp32 and in a fixed
        order. ``index_select`` adds row after row into one row of bf16, on CUDA by atomics.
        """
        if self.count and not (self.start % self.per_sample or self.stop % self.per_sample):
            return values[self.start // self.per_sample : self.stop // self.per_sample]

        parts: list[Tensor] = []
        ranges, by_sample, differ = list(self.sample_ranges()), values.unbind(), values.shape[1] > 1
        for sample, lo, hi in ranges:
            part = by_sample[sample][lo:hi] if differ else by_sample[sample]
            parts.append(part if len(ranges) == 1 else part.expand(hi - lo, *part.shape[1:]))
        return torch.cat(parts)[None] if len(ranges) > 1 else parts[0][None]

    @property
    def local_samples(self) -> slice:
        """The samples that the local rows belong to; at least one."""
        first = min(self.start // self.per_sample, self.grid.num_samples - 1)
        return slice(first, max(first + 1, -(-self.stop // self.per_sample)))

    def samples(self, device: torch.device) -> Tensor:
        """The sample of each row, int64 ``[R]``."""
        return torch.arange(self.start, self.stop, device=device) // self.per_sample

    def patches(self, device: torch.device) -> Tensor:
        """The patch, 0 to S - 1, of each local row and token, int64: ``[1, S]`` or ``[R, 1]``."""
        if self.layout == SPATIAL:
            # A row runs through all patches.
            return torch.arange(self.length, device=device)[None]
        rows = torch.arange(self.start, self.stop, device=device)[:, None] % self.per_sample
        return rows if self.grid.windows is None else self.grid.window_order(device)[rows]

    def frames(self, device: torch.device) -> Tensor:
        """The frame, 0 to T - 1, of each local row and token, int64: ``[R, 1]`` or ``[1, T]``."""
        if self.layout == SPATIAL:
            return torch.arange(self.start, self.stop, device=device)[:, None] % self.per_sample
        return torch.arange(self.length, device=device)[None]

    def scale(self, device: torch.device) -> Tensor:
        """What positions are divided by: ``[]``, or ``[R, 1]`` if each clip has its own."""
        scale = self.grid.scale
        if scale is None:
            return torch.ones((), device=device)
        return scale if self.grid.mask is None else scale[self.samples(device)][:, None]

    def transpose(self, x: Tensor, *, copy: bool = True) -> tuple[Tensor, Rows]:
        """Tokens ``[R, L, C]`` of whole samples in the other layout, and the rows of these.

        Without ``copy`` the tokens of a single sample may be a view.
        """
        grid, x = self.grid, x.unflatten(0, (-1, self.per_sample))  # [samples, rows, L, C]
        if grid.windows is not None and self.layout == TEMPORAL:
            x = take(x, grid.window_order(x.device, inverse=True), dim=1)  # line by line
        x = x.transpose(1, 2)
        if grid.windows is not None and self.layout == SPATIAL:
            x = take(x, grid.window_order(x.device), dim=1)

        # Samples are whole, so rows begin and end with a sample in both layouts.
        start, stop = (edge // self.per_sample * self.length for edge in (self.start, self.stop))
        x = x.flatten(0, 1)
        return x.contiguous() if copy else x, self.transposed().take(start, stop)

    @property
    def are_sequences(self) -> bool:
        """True if each row is one attention sequence (no windows, mask or full attention)."""
        in_windows = self.layout == TEMPORAL and self.grid.kernel is not None
        return self.grid.mask is None and not in_windows and not self.grid.full

    @property
    def longest_sequence(self) -> int:
        """Tokens that attend to each other, at most: of a row, window or sample."""
        grid = self.grid
        if grid.full:
            return grid.frames * grid.patches_per_frame
        if self.layout == TEMPORAL and grid.windows is not None:
            return grid.frames * max(grid.windows.sizes)
        return self.length

    def groups(self, units: Sequence[int] | None = None) -> Groups:
        """The tokens that attend to each other, made once for a batch.

        Args:
            units: numbers of the frames, patches, windows or samples that the tokens make up, in
                their order and counted sample by sample; None for the units of the local rows.
        """
        return ROWS if self.are_sequences else self._groups(units)

    # Inside of a graph, the cache would be guarded.
    @uncompiled
    def _groups(self, units: Sequence[int] | None) -> Groups:
        key = (self.layout, self.start, self.stop) if units is None else (self.layout, tuple(units))
        return self.grid.cached(key, lambda: self._find_groups(units))

    @property
    def local_groups(self) -> Groups | None:
        """``groups()`` of the local rows; None if parts of these attend elsewhere."""
        starts = self._unit_starts()
        are_whole = all(edge % self.per_sample in starts for edge in (self.start, self.stop))
        return self.groups() if self.are_sequences or are_whole else None

    def _unit_starts(self) -> Sequence[int]:
        """The first row of each unit of a sample: of the rows, windows or samples that attend."""
        if self.grid.full:
            return [0]
        if self.layout == TEMPORAL and self.grid.windows is not None:
            return [0, *accumulate(self.grid.windows.sizes[:-1])]
        return range(self.per_sample)

    def _find_groups(self, units: Sequence[int] | None) -> Groups:
        grid, starts = self.grid, self._unit_starts()
        are_rows = len(starts) == self.per_sample
        if grid.mask is None and are_rows:
            return ROWS

        def first_row(unit: int) -> int:
            sample, number = divmod(unit, len(starts))
            return sample * self.per_sample + starts[number]

        def unit_at(row: int) -> int:
            sample, number = divmod(row, self.per_sample)
            return sample * len(starts) + bisect_left(starts, number)

        if units is None:
            units = range(unit_at(self.start), unit_at(self.stop))
            ends = first_row(units.start), first_row(units.stop)
            assert ends == (self.start, self.stop), "local rows begin and end with a unit"
        if grid.mask is None or not units:
            sizes = [first_row(unit + 1) - first_row(unit) for unit in units]
            return Groups.of([size * self.length for size in sizes])

        # Which tokens of the units, from the first to the last, are inside of their clip.
        first, last = min(units), max(units) + 1
        start, stop = first_row(first), first_row(last)
        inside = self.take(start, stop).inside(torch.device("cpu")).any(-1).flatten()

        # How many these are in each of the units.
        edges = [(first_row(unit) - start) * self.length for unit in range(first, last + 1)]
        counts = F.pad(inside.cumsum(0), (1, 0))[edges].diff().tolist()
        if are_rows and sum(counts) == len(inside):
            return ROWS

        # The units as they are passed: in another order, perhaps more than once.
        numbers = [unit - first for unit in units]
        if not isinstance(units, range):
            inside = torch.cat([inside[edges[i] : edges[i + 1]] for i in numbers])
        index = to_device(inside.nonzero().flatten(), grid.mask.positions.device)
        return Groups.of([counts[i] for i in numbers if counts[i]], index)

    def slice(self, z: Tensor) -> Tensor:
        """Cut the patches of these rows out of a whole tensor.

        Args:
            z: ``[B, c, frames, height, width]``, ``[B, frames, height, width]`` (c = 1) or
                ``[B, frames]`` (c = 1, one value for all positions of a frame), of any dtype, in
                latent positions.

        Returns:
            ``[R, L, V * c]``, the channels of a patch ordered (pt, ph, pw, c) as the model's output
            is. Positions beyond the border of the latent are zero.

        Raises:
            ValueError: if ``z`` does not have the size of the batch this grid was made for.
        """
        z = self._padded(z)  # [B, c, T * pt, H * ph, W * pw]
        return torch.cat(
            [self._slice_sample(z[sample], lo, hi) for sample, lo, hi in self.sample_ranges()]
        )

    def inside(self, device: torch.device) -> Tensor:
        """The positions of the patches inside of their clip, bool ``[R, L, V]``; False: padding."""
        if self.grid.mask is not None:
            return self.slice(self.grid.mask.on(device))
        ones = torch.ones((), dtype=torch.bool, device=device)
        return self.slice(ones.expand(self.grid.num_samples, *self.grid.latent_size))

    def clear_outside(self, patches: Tensor) -> Tensor:
        """Patches ``[R, L, V * c]`` with zeros outside of their clip, if the batch has a mask."""
        if self.grid.mask is None:
            return patches
        inside = self.inside(patches.device)  # [R, L, V]
        channels = patches.shape[-1] // inside.shape[-1]
        return patches.masked_fill(~inside.repeat_interleave(channels, dim=-1), 0)

    def _padded(self, z: Tensor) -> Tensor:
        """``z`` as ``[B, c, frames, height, width]``, with zeros up to whole patches."""
        grid, (frames, height, width), shape = self.grid, self.grid.latent_size, tuple(z.shape)
        if shape == (grid.num_samples, frames):
            z = z[:, :, None, None].expand(-1, -1, height, width)
        if z.ndim == 4:
            z = z[:, None]
        if z.ndim != 5 or (len(z), *z.shape[2:]) != (grid.num_samples, *grid.latent_size):
            raise ValueError(
                f"got a tensor of shape {shape}; expected [{grid.num_samples}, channels, "
                f"{frames}, {height}, {width}], [{grid.num_samples}, {frames}, {height}, {width}] "
                f"or [{grid.num_samples}, {frames}]; pass a tensor of the batch that the model was "
                "called with"
            )

        sizes = zip(grid.latent_size, grid.patch_size, strict=True)
        frames, height, width = (-size % patch for size, patch in sizes)
        return F.pad(z, (0, width, 0, height, 0, frames)) if frames or height or width else z

    def _slice_sample(self, z: Tensor, lo: int, hi: int) -> Tensor:
        """Rows ``[lo, hi)`` of a padded sample: ``[hi - lo, L, V * c]``."""
        (_, _, W), (pt, ph, pw), windows = self.grid.shape, self.grid.patch_size, self.grid.windows
        patches = dict(pt=pt, ph=ph, pw=pw)
        if self.layout == SPATIAL:
            z = z[:, lo * pt : hi * pt]
            return rearrange(z, "c (t pt) (h ph) (w pw) -> t (h w) (pt ph pw c)", **patches)

        # Only the lines of patches that these rows touch.
        wanted = range(lo, hi) if windows is None else windows.order[lo:hi]
        top, bottom = (min(wanted) // W, max(wanted) // W + 1) if wanted else (0, 0)
        z = z[:, :, top * ph : bottom * ph]
        z = rearrange(z, "c (t pt) (h ph) (w pw) -> (h w) t (pt ph pw c)", **patches)
        if windows is None:
            return z[lo - top * W : hi - top * W]
        return take(z, self.grid.window_order(z.device)[lo:hi] - top * W)


def unpatchify(x: Tensor, rows: Rows) -> Tensor:
    """All rows of a batch ``[B * T, S, V * c]`` or ``[B * S, T, V * c]`` as latents, cropped.

    Returns:
        ``[B, c, frames, height, width]``.
    """
    grid = rows.grid
    (T, H, W), (pt, ph, pw), (frames, height, width) = grid.shape, grid.patch_size, grid.latent_size
    if rows.layout == TEMPORAL and grid.windows is not None:
        x = x.unflatten(0, (-1, H * W))
        x = take(x, grid.window_order(x.device, inverse=True), dim=1).flatten(0, 1)  # line by line

    tokens = "(b t) (h w)" if rows.layout == SPATIAL else "(b h w) t"
    pattern = f"{tokens} (pt ph pw c) -> b c (t pt) (h ph) (w pw)"
    x = rearrange(x, pattern, t=T, h=H, w=W, pt=pt, ph=ph, pw=pw)
    return x[:, :, :frames, :height, :width]
