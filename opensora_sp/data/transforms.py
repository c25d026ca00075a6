"""From decoded frames to the input of a VAE: resized, cropped, scaled to [-1, 1], perhaps degraded.

From degraded clips a model learns to predict the true ones (Open-Sora 1.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

# Kinds of degradation, and their strengths: ratios to draw from, or the largest share of noise.
Kind = Literal["downsample_spatial", "downsample_temporal", "gaussian_pixel", "gaussian_feature"]
Ratios = Annotated[list[Literal[1, 2, 4, 8]], Field(min_length=1)]
DOWNSAMPLING = ("downsample_spatial", "downsample_temporal")


def resize_and_crop(
    frames: np.ndarray, size: tuple[int, int], place: tuple[float, float] | None = None
) -> Tensor:
    """Resize so that the frame covers ``size``, then crop to it; the same for all frames of a clip.

    Resizing is bilinear with antialiasing, in uint8: several times faster than in float, and equal
    but for rounding.

    Args:
        frames: uint8 ``[F, height, width, 3]``.
        size: height and width of the result.
        place: position of the crop, from (0, 0) top left to (1, 1) bottom right; the centre by
            default.

    Returns:
        uint8 ``[3, F, *size]``.
    """
    clip = torch.from_numpy(frames).permute(0, 3, 1, 2)  # [F, 3, h, w], channels last in memory
    height, width = size
    if clip.shape[-2:] != (height, width):
        factor = max(height / clip.shape[-2], width / clip.shape[-1])
        covering = [
            max(height, round(clip.shape[-2] * factor)),
            max(width, round(clip.shape[-1] * factor)),
        ]
        clip = F.interpolate(clip, covering, mode="bilinear", antialias=True)

        top, left = covering[0] - height, covering[1] - width
        if place is None:
            top, left = top // 2, left // 2
        else:
            top = min(top, int(place[0] * (top + 1)))
            left = min(left, int(place[1] * (left + 1)))
        clip = clip[:, :, top : top + height, left : left + width]
    return clip.transpose(0, 1).contiguous()


def scale(clip: Tensor) -> Tensor:
    """uint8 of any shape -> float32 in [-1, 1]."""
    return clip.float().div_(127.5).sub_(1)


def to_clip(frames: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Frames ``[F, height, width, 3]`` -> float ``[3, F, *size]`` in [-1, 1], a centre crop."""
    return scale(resize_and_crop(frames, size))


def to_frames(clip: Tensor) -> np.ndarray:
    """``[3, F, height, width]`` in [-1, 1] -> uint8 frames."""
    return quantized(clip).cpu().numpy()


def quantized(clip: Tensor) -> Tensor:
    """``[3, F, height, width]`` in [-1, 1] -> uint8 ``[F, height, width, 3]`` on its device."""
    scaled = (clip.float().clamp(-1, 1) + 1) * 127.5
    return scaled.round().byte().permute(1, 2, 3, 0)


@dataclass(frozen=True, kw_only=True)
class Degradation:
    """The draws of a clip: ratios of sizes, shares of noise, and the seed of this noise."""

    downsample_spatial: int = 1
    downsample_temporal: int = 1
    gaussian_pixel: float = 0.0
    gaussian_feature: float = 0.0
    noise_seed: int = 0

    @classmethod
    def draw(
        cls, prob: Mapping[Kind, float], strength: Mapping[Kind, Any], rng: np.random.Generator
    ) -> Degradation:
        """Draw each kind with its probability: a ratio, or a share of noise up to its bound."""
        drawn: dict[str, Any] = {"noise_seed": int(rng.integers(1 << 62))}
        for kind in get_args(Kind):
            # Always two numbers: a probability changes the draws of its kind alone.
            happens, which = rng.random(2)
            if happens >= prob.get(kind, 0.0):
                continue
            most = strength[kind]
            drawn[kind] = most[int(which * len(most))] if kind in DOWNSAMPLING else which * most
        return cls(**drawn)

    @property
    def keeps_pixels(self) -> bool:
        """True if a clip is encoded as it is."""
        ratios = self.downsample_spatial, self.downsample_temporal
        return ratios == (1, 1) and not self.gaussian_pixel

    def of_pixels(self, video: Tensor) -> Tensor:
        """The degraded clip ``[1, 3, F, h, w]``: smaller and back to its size, with noise."""
        # Space first, frame by frame, as in the release.
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


def check_degradation(
    prob: Mapping[Kind, float] | None, strength: Mapping[Kind, Any] | None
) -> None:
    """Raise ValueError unless some kinds have a probability, and each of these its strength."""
    if not prob:
        raise ValueError(
            f"got noise_augmentation with noise_prob {prob}; expected the probability of at least "
            f"one of {list(get_args(Kind))}; set noise_prob and noise_strength, or remove "
            "noise_augmentation"
        )
    for kind in prob:
        bound, is_ratio = (strength or {}).get(kind), kind in DOWNSAMPLING
        if not isinstance(bound, list if is_ratio else float):
            expected = "a list of ratios" if is_ratio else "the largest share of noise"
            raise ValueError(
                f"got noise_strength[{kind!r}] = {bound!r}; expected {expected}; set it, or remove "
                f"{kind} from noise_prob"
            )
