"""From decoded frames to the input of a VAE: resized, cropped, scaled to [-1, 1]."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


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
