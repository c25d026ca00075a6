"""From decoded frames to what a VAE takes: resized, cropped, in [-1, 1]."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

TRANSFORMS = ("resize_center_crop", "resize_random_crop")


def resize_and_crop(
    frames: np.ndarray, size: tuple[int, int], place: tuple[float, float] | None = None
) -> Tensor:
    """Resize so that the frame covers ``size``, then crop to it; all frames of a clip alike.

    Resizing is bilinear with antialiasing, in uint8: several times faster than in float, and equal but for rounding.

    Args:
        frames: uint8 ``[F, height, width, 3]``.
        size: height and width to come out.
        place: where the crop lies, from (0, 0) top left to (1, 1) bottom right; the centre by default.

    Returns:
        uint8 ``[3, F, *size]``.
    """
    clip = torch.from_numpy(frames).permute(0, 3, 1, 2)  # [F, 3, h, w], channels last in memory
    have = tuple(clip.shape[-2:])
    if have != tuple(size):
        factor = max(want / got for want, got in zip(size, have, strict=True))
        covering = [max(want, round(got * factor)) for want, got in zip(size, have, strict=True)]
        clip = F.interpolate(clip, covering, mode="bilinear", antialias=True)
        spare = [got - want for want, got in zip(size, covering, strict=True)]
        if place is None:
            top, left = (room // 2 for room in spare)
        else:
            top, left = (
                min(room, int(share * (room + 1))) for room, share in zip(spare, place, strict=True)
            )
        clip = clip[:, :, top : top + size[0], left : left + size[1]]
    return clip.transpose(0, 1).contiguous()


def scale(clip: Tensor) -> Tensor:
    """uint8 of any shape -> float32 in [-1, 1]."""
    return clip.float().div_(127.5).sub_(1)


def to_clip(frames: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Frames ``[F, height, width, 3]`` -> float ``[3, F, *size]`` in [-1, 1], the centre of what covers ``size``."""
    return scale(resize_and_crop(frames, size))


def to_frames(clip: Tensor) -> np.ndarray:
    """``[3, F, height, width]`` in [-1, 1] -> uint8 frames."""
    return (
        ((clip.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).cpu().numpy()
    )
