"""Degraded clips, from which a model learns to predict the true ones (Open-Sora 1.3).

Legend: F frames, h x w size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

RATIOS = (1, 2, 4, 8)
DOWNSAMPLING = ("downsample_spatial", "downsample_temporal")
NOISE = ("gaussian_pixel", "gaussian_feature")
KINDS = (*DOWNSAMPLING, *NOISE)


@dataclass(frozen=True, kw_only=True)
class Degradation:
    """What is drawn for a clip: ratios of sizes, shares of noise, and the seed of this noise."""

    downsample_spatial: int = 1
    downsample_temporal: int = 1
    gaussian_pixel: float = 0.0
    gaussian_feature: float = 0.0
    noise_seed: int = 0

    @classmethod
    def draw(
        cls, prob: Mapping[str, float], strength: Mapping[str, Any], rng: np.random.Generator
    ) -> Degradation:
        """Each kind with its probability: one of its ratios, or a share of noise up to its own."""
        drawn: dict[str, Any] = {"noise_seed": int(rng.integers(1 << 62))}
        for kind in KINDS:
            # Always two numbers: a probability changes the draws of its own kind alone.
            happens, which = rng.random(2)
            if happens >= prob.get(kind, 0.0):
                continue
            most = strength[kind]
            drawn[kind] = most[int(which * len(most))] if kind in DOWNSAMPLING else which * most
        return cls(**drawn)

    @property
    def keeps_pixels(self) -> bool:
        """Whether a clip is encoded as it is."""
        ratios = self.downsample_spatial, self.downsample_temporal
        return ratios == (1, 1) and not self.gaussian_pixel

    def of_pixels(self, video: Tensor) -> Tensor:
        """The degraded clip ``[1, 3, F, h, w]``: smaller and back to its size, with noise."""
        frames = video[0].transpose(0, 1)  # [F, 3, h, w]
        frames = _resampled(frames, [self.downsample_spatial] * 2, "bilinear")
        video = frames.transpose(0, 1)[None]
        video = _resampled(video, [self.downsample_temporal, 1, 1], "trilinear")
        return self._with_noise(video, self.gaussian_pixel, self.noise_seed)

    def of_latents(self, latents: Tensor) -> Tensor:
        """Its latents, of any shape, with noise."""
        return self._with_noise(latents, self.gaussian_feature, self.noise_seed + 1)

    @staticmethod
    def _with_noise(x: Tensor, share: float, seed: int) -> Tensor:
        if not share:
            return x
        # Drawn on the device: a clip has 80 million pixels.
        rng = torch.Generator(x.device).manual_seed(seed)
        noise = torch.randn(x.shape, generator=rng, device=x.device, dtype=x.dtype)
        return (1 - share) * x + share * noise


def _resampled(x: Tensor, ratios: list[int], mode: str) -> Tensor:
    """``x`` at ``1 / ratios`` of its last sizes, and back; at least one pixel or frame is left."""
    size = x.shape[2:]
    ratios = [min(ratio, length) for ratio, length in zip(ratios, size, strict=True)]
    if max(ratios) == 1:
        return x
    scales = [1 / ratio for ratio in ratios]
    smaller = F.interpolate(x, scale_factor=scales, mode=mode, align_corners=False)
    back: Tensor = F.interpolate(smaller, size=size, mode=mode, align_corners=False)
    return back


def check_degradation(prob: Mapping[str, float] | None, strength: Mapping[str, Any] | None) -> None:
    """Raise ValueError unless probabilities and strengths are of known kinds and in range."""
    if not prob:
        raise ValueError(
            f"got noise_augmentation with noise_prob {prob}; expected the probability of at least "
            f"one of {list(KINDS)}; set noise_prob and noise_strength, or remove noise_augmentation"
        )
    for kind, probability in prob.items():
        if kind not in KINDS or not _is_share(probability):
            raise ValueError(
                f"got noise_prob[{kind!r}] = {probability!r}; expected a probability from 0 to 1 "
                f"of one of {list(KINDS)}; correct it"
            )
        found = (strength or {}).get(kind)
        if kind in DOWNSAMPLING:
            fits = isinstance(found, (list, tuple)) and bool(found) and all(map(_is_ratio, found))
            expected = f"a list of ratios, some of {list(RATIOS)}"
        else:
            fits, expected = _is_share(found), "the largest share of noise, from 0 to 1"
        if not fits:
            raise ValueError(
                f"got noise_strength[{kind!r}] = {found!r}; expected {expected}; correct it, or "
                f"remove {kind} from noise_prob"
            )


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _is_ratio(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in RATIOS
