"""Where a token lives: the patch grid of a batch, and the rows of one layout.

STDiT alternates attention over the patches of one frame and over the frames of one patch, so its tokens
are kept in rows that one attention can take whole:

* spatial layout: one row per (sample, frame), ``S`` patches long;
* temporal layout: one row per (sample, patch), ``T`` frames long.

``Rows`` says which contiguous run of these rows a tensor holds. The bare model holds all of them.

Legend: B samples, T frames of patches, H x W patches per frame, S = H * W, R rows held, L row length
(S or T), c channels of a latent, (pt, ph, pw) patch size, V = pt * ph * pw patch volume.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

SPATIAL = "spatial"
TEMPORAL = "temporal"


@dataclass(frozen=True)
class PatchGrid:
    """The patches of a batch of latents ``[B, c, frames, height, width]``; borders are padded up to a patch."""

    num_samples: int
    latent_size: tuple[int, int, int]
    patch_size: tuple[int, int, int]

    @classmethod
    def of(cls, x: Tensor, patch_size: tuple[int, int, int]) -> PatchGrid:
        """The grid of latents ``x`` ``[B, c, frames, height, width]``."""
        num_samples, _, frames, height, width = x.shape
        return cls(num_samples=num_samples, latent_size=(frames, height, width), patch_size=patch_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of patches along time, height and width: (T, H, W)."""
        t, h, w = (-(-size // patch) for size, patch in zip(self.latent_size, self.patch_size, strict=True))
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
        pt, ph, pw = self.patch_size
        return pt * ph * pw

    def rows(self, layout: str) -> Rows:
        """All rows of the batch in one layout."""
        whole = Rows(grid=self, layout=layout, start=0, stop=0)
        return replace(whole, stop=whole.total)


@dataclass(frozen=True)
class Rows:
    """The run ``[start, stop)`` of a batch's rows in one layout, counted sample by sample (batch-major)."""

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
        """Rows of the whole batch, held here or elsewhere."""
        return self.grid.num_samples * self.per_sample

    @property
    def count(self) -> int:
        """R, rows held here; may be zero."""
        return self.stop - self.start

    def take(self, start: int, stop: int) -> Rows:
        """The run ``[start, stop)`` of the same batch in the same layout."""
        return replace(self, start=start, stop=stop)

    def turned(self) -> Rows:
        """All rows of the same batch in the other layout."""
        return self.grid.rows(TEMPORAL if self.layout == SPATIAL else SPATIAL)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """``(sample, lo, hi)``: sample by sample the rows held here, numbered within the sample.

        Yields one empty run where nothing is held, so that every caller takes the same path.
        """
        if not self.count:
            yield 0, 0, 0
        for sample in range(self.start // self.per_sample, -(-self.stop // self.per_sample)):
            first = sample * self.per_sample
            if (lo := max(self.start - first, 0)) < (hi := min(self.stop - first, self.per_sample)):
                yield sample, lo, hi

    def tokens_per_sample(self) -> list[int]:
        """Tokens held of each of the B samples, as host integers."""
        tokens = [0] * self.grid.num_samples
        for sample, lo, hi in self.runs():
            tokens[sample] = (hi - lo) * self.length
        return tokens

    def samples(self, device: torch.device) -> Tensor:
        """The sample of each row, int64 ``[R]``."""
        return torch.arange(self.start, self.stop, device=device) // self.per_sample

    def frame_values(self, per_frame: Tensor) -> Tensor:
        """Values given per frame of patches ``[B, T]``, one for each row and frame held: ``[R, 1]`` or ``[R, T]``."""
        if self.layout == SPATIAL:
            return per_frame.flatten()[self.start : self.stop, None]  # [R, 1]: a row is one frame
        return per_frame[self.samples(per_frame.device)]  # [R, T]: a row runs through all frames

    def patches(self, device: torch.device) -> Tensor:
        """The patch of a frame, 0 to S - 1, that each row and token held is of, int64: ``[1, S]`` or ``[R, 1]``."""
        if self.layout == SPATIAL:
            return torch.arange(self.length, device=device)[None]  # a row runs through all patches
        return torch.arange(self.start, self.stop, device=device)[:, None] % self.per_sample

    def slice(self, z: Tensor) -> Tensor:
        """Cut the patches of these rows out of a whole tensor.

        Args:
            z: ``[B, c, frames, height, width]``, ``[B, frames, height, width]`` (c = 1) or ``[B, frames]``
               (c = 1, one value for all positions of a frame), of any dtype, in latent positions.

        Returns:
            ``[R, L, V * c]``, the channels of a patch ordered (pt, ph, pw, c) as the model's output is. Positions
            beyond the border of the latent are zero.

        Raises:
            ValueError: if ``z`` does not have the size of the batch this grid was made for.
        """
        z = self._as_latent(z)  # [B, c, frames, height, width]
        return torch.cat([self._slice_sample(z[sample], lo, hi) for sample, lo, hi in self.runs()])

    def inside(self, device: torch.device) -> Tensor:
        """Which positions of the patches lie inside the latent, bool ``[R, L, V]``; the others are padding."""
        ones = torch.ones((), dtype=torch.bool, device=device)
        return self.slice(ones.expand(self.grid.num_samples, *self.grid.latent_size))

    def _as_latent(self, z: Tensor) -> Tensor:
        num_samples, size = self.grid.num_samples, self.grid.latent_size
        if z.ndim == 2 and z.shape == (num_samples, size[0]):
            return z[:, None, :, None, None].expand(num_samples, 1, *size)
        if z.ndim == 4 and z.shape == (num_samples, *size):
            return z[:, None]
        if z.ndim == 5 and (z.shape[0], *z.shape[2:]) == (num_samples, *size):
            return z
        frames, height, width = size
        raise ValueError(
            f"got a tensor of shape {tuple(z.shape)}; expected [{num_samples}, channels, {frames}, {height}, {width}], "
            f"[{num_samples}, {frames}, {height}, {width}] or [{num_samples}, {frames}]; "
            "pass a tensor of the batch that the model was called with"
        )

    def _slice_sample(self, z: Tensor, lo: int, hi: int) -> Tensor:
        """Rows ``[lo, hi)`` of one sample ``[c, frames, height, width]`` -> ``[hi - lo, L, V * c]``."""
        (T, H, W), (pt, ph, pw) = self.grid.shape, self.grid.patch_size
        patches = dict(pt=pt, ph=ph, pw=pw)
        if self.layout == SPATIAL:
            z = _pad_to(z[:, lo * pt : hi * pt], ((hi - lo) * pt, H * ph, W * pw))
            return rearrange(z, "c (t pt) (h ph) (w pw) -> t (h w) (pt ph pw c)", **patches)
        top, bottom = lo // W, -(-hi // W)  # lines of patches that these rows touch
        z = _pad_to(z[:, :, top * ph : bottom * ph], (T * pt, (bottom - top) * ph, W * pw))
        z = rearrange(z, "c (t pt) (h ph) (w pw) -> (h w) t (pt ph pw c)", **patches)
        return z[lo - top * W : hi - top * W]


def unpatchify(x: Tensor, grid: PatchGrid) -> Tensor:
    """All temporal rows ``[B * S, T, V * c]`` -> latents ``[B, c, frames, height, width]``, padding cropped."""
    (_, H, W), (pt, ph, pw), (frames, height, width) = grid.shape, grid.patch_size, grid.latent_size
    pattern = "(b h w) t (pt ph pw c) -> b c (t pt) (h ph) (w pw)"
    x = rearrange(x, pattern, h=H, w=W, pt=pt, ph=ph, pw=pw)
    return x[:, :, :frames, :height, :width]


def _pad_to(z: Tensor, size: tuple[int, int, int]) -> Tensor:
    """Zeros at the far end of the last three dims, up to ``size``."""
    if z.shape[-3:] == size:
        return z
    padded = z.new_zeros(*z.shape[:-3], *size)  # F.pad refuses empty dims, which ranks without rows have
    padded[..., : z.shape[-3], : z.shape[-2], : z.shape[-1]] = z
    return padded
