"""Encoders without weights for the demo and for tests, not for real videos."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opensora_sp.transfer import to_device


class PatchPoolVAE(nn.Module):
    """Stand-in for a VAE: average pooling over ``pool`` = (frames, height, width).

    Decoding interpolates. Frames are independent if ``pool`` takes one at a time.
    """

    channels = 3
    scale = 1.0

    def __init__(self, pool: tuple[int, int, int] = (2, 4, 4)) -> None:
        super().__init__()
        self.pool = tuple(pool)
        if len(self.pool) != 3 or min(self.pool) < 1:
            raise ValueError(
                f"got pool {self.pool}; expected (frames, height, width) >= 1; change vae.pool"
            )
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


class HashedBagOfWords(nn.Module):
    """Stand-in for a text encoder: a fixed random vector per word and per pair of neighbours."""

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
        seed = int.from_bytes(hashlib.sha256(token.encode()).digest()[:8], "little")
        generator = np.random.Generator(np.random.Philox(seed))
        return torch.from_numpy(generator.standard_normal(self.width)).float()
