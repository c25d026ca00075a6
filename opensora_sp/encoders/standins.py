"""Encoders without weights for the demo and for tests, not for real videos."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opensora_sp.common.tensors import to_device

from .loading import Positive


class PatchPoolVAE(nn.Module):
    """Stand-in for a VAE: average pooling over ``pool`` = (frames, height, width).

    Decoding interpolates. Frames are independent if ``pool`` takes one at a time.
    """

    channels = 3
    scale = 1.0

    def __init__(self, pool: tuple[Positive, Positive, Positive] = (2, 4, 4)) -> None:
        super().__init__()
        self.pool = tuple(pool)
        self.chunk_frames = self.chunk_latent_frames = 1 if self.pool[0] == 1 else None

    def encode(self, video: Tensor) -> Tensor:
        # A clip or image smaller than the pool is one mean, as is the remainder of a larger one.
        window = tuple(min(pair) for pair in zip(self.pool, video.shape[2:], strict=True))
        return F.avg_pool3d(video, window, ceil_mode=True)

    def decode(self, latents: Tensor, *, num_frames: int) -> Tensor:
        factors = tuple(map(float, self.pool))
        video = F.interpolate(
            latents.float(), scale_factor=factors, mode="trilinear", align_corners=False
        )
        return video[:, :, :num_frames]

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        f, h, w = (-(-n // p) for n, p in zip((num_frames, height, width), self.pool, strict=True))
        return f, h, w


class PatchDCTVAE(nn.Module):
    """Stand-in for a VAE: the lowest frequencies of each patch of ``pool`` (frames, height, width).

    Frames of a patch are averaged. Its ``coefficients`` x ``coefficients`` lowest frequencies of
    the discrete cosine transform (Ahmed, Natarajan and Rao, 1974) are the channels of each colour,
    scaled up with frequency, as amplitudes of images fall with it. Sides that are no multiple of
    ``pool`` are padded by their last frame, line or column.

    Decoding returns whole patches: a sum of cosines that reach half a patch into the neighbours,
    which has these frequencies in each patch, and no edges of patches.

    Raises:
        ValueError: if a side of ``pool`` has fewer pixels than ``coefficients``.
    """

    scale = 1.0

    lines: Tensor
    columns: Tensor
    weights: Tensor

    def __init__(
        self,
        pool: tuple[Positive, Positive, Positive] = (2, 16, 16),
        coefficients: Positive = 3,
    ) -> None:
        super().__init__()
        self.pool = tuple(pool)
        if coefficients > min(self.pool[1:]):
            raise ValueError(
                f"got pool {self.pool} and coefficients {coefficients}; expected at most as many "
                "as pixels of a side; change vae.pool or vae.coefficients"
            )

        self.channels = 3 * coefficients**2
        self.chunk_frames = self.chunk_latent_frames = 1 if self.pool[0] == 1 else None

        for name, side in (("lines", self.pool[1]), ("columns", self.pool[2])):
            cosines = _cosines(torch.arange(side) + 0.5, side, coefficients)
            self.register_buffer(name, cosines, persistent=False)

        u = torch.arange(float(coefficients))
        frequency = torch.hypot(u[:, None], u)
        weights = torch.where(frequency > 0, 9 * frequency**0.7, 1.8)
        self.register_buffer("weights", weights[..., None, None, None], persistent=False)

    def encode(self, video: Tensor) -> Tensor:
        video = self._padded(video)
        for dim, side in zip((2, 4, 6), self.pool, strict=True):
            video = video.unflatten(dim, (-1, side))

        pixels = video.mean(3)  # [B, 3, f, h, pool height, w, pool width]
        lines, columns = self.lines.to(pixels), self.columns.to(pixels)
        frequencies = torch.einsum("bcfhywx,uy,vx->bcuvfhw", pixels, lines, columns)

        frequencies = frequencies / (self.pool[1] * self.pool[2])
        return (frequencies * self.weights.to(pixels)).flatten(1, 3)

    def decode(self, latents: Tensor, *, num_frames: int) -> Tensor:
        count = len(self.lines)
        frequencies = latents.float().unflatten(1, (3, count, count))
        frequencies = frequencies / self.weights.to(frequencies)

        lines = _overlapping(latents.shape[3], self.lines).to(frequencies)
        columns = _overlapping(latents.shape[4], self.columns).to(frequencies)
        frames = torch.einsum("bcuvfhw,huy,wvx->bcfyx", frequencies, lines, columns)
        return frames.repeat_interleave(self.pool[0], dim=2)[:, :, :num_frames]

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        f, h, w = (-(-n // p) for n, p in zip((num_frames, height, width), self.pool, strict=True))
        return f, h, w

    def _padded(self, video: Tensor) -> Tensor:
        # By index, as F.pad takes one kind of repetition for few dtypes only.
        for dim, side in zip((2, 3, 4), self.pool, strict=True):
            length = video.shape[dim]
            if missing := -length % side:
                last = video.narrow(dim, length - 1, 1)
                video = torch.cat([video, last.repeat_interleave(missing, dim)], dim)
        return video


def _cosines(place: Tensor, side: int, count: int) -> Tensor:
    """Cosines ``[..., count, places]`` at places ``[..., places]``, in pixels from a patch's start.

    Of mean square one, and orthogonal in the patch.
    """
    u = torch.arange(count, device=place.device)[:, None]
    cosines = torch.cos(torch.pi * u * place[..., None, :] / side)
    return torch.where(u > 0, 2**0.5 * cosines, cosines)


def _overlapping(patches: int, cosines: Tensor) -> Tensor:
    """Smooth functions ``[patches, count, patches * side]``, float64, of cosines ``[count, side]``.

    Each has one frequency of one patch, and none of those of the other patches.
    """
    count, side = cosines.shape
    patch = torch.arange(patches, dtype=torch.float64, device=cosines.device)
    place = torch.arange(patches * side, device=cosines.device) + 0.5
    from_start = place - side * patch[:, None]

    distance = (from_start / side - 0.5).abs().clamp(max=1)
    windows = torch.cos(torch.pi / 2 * distance).square()
    # The first and the last patch share their outer half with no neighbour.
    windows = windows / windows.sum(0)
    smooth = (windows[:, None] * _cosines(from_start, side, count)).flatten(0, 1)

    analysis = torch.block_diag(*[cosines.double() / side] * patches)
    return torch.linalg.solve(smooth @ analysis.T, smooth).unflatten(0, (patches, count))


class HashedBagOfWords(nn.Module):
    """Stand-in for a text encoder: a fixed random vector per word and per pair of neighbours."""

    device_marker: Tensor

    def __init__(self, width: int = 64, max_length: int = 24) -> None:
        super().__init__()
        self.width, self.max_length = width, max_length
        self.register_buffer("device_marker", torch.empty(0), persistent=False)

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        features = torch.zeros(len(texts), 1, self.max_length, self.width)
        mask = torch.zeros(len(texts), self.max_length, dtype=torch.int64)

        for i, text in enumerate(texts):
            tokens = self._tokens(text)[: self.max_length]
            for j, token in enumerate(tokens):
                features[i, 0, j] = self._vector(token)
            mask[i, : len(tokens)] = 1

        return to_device(features, self.device_marker.device), mask

    def num_tokens(self, text: str) -> int:
        return len(self._tokens(text))

    @staticmethod
    def _tokens(text: str) -> list[str]:
        words = text.lower().split()
        return [*words, *(f"{a} {b}" for a, b in pairwise(words))]

    def _vector(self, token: str) -> Tensor:
        # Python salts its own hash in each process.
        seed = int.from_bytes(hashlib.sha256(token.encode()).digest()[:8], "little")
        generator = np.random.Generator(np.random.Philox(seed))
        return torch.from_numpy(generator.standard_normal(self.width)).float()
