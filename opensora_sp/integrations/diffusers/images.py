"""Images as frames of the sampler, and its frames as the outputs of a diffusers pipeline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

logger = logging.getLogger(__name__)
OUTPUT_TYPES = ("pil", "np", "pt", "latent")


def images_of(image: Any, count: int) -> list[np.ndarray | None]:
    """The first frame of each of ``count`` videos, uint8 ``[1, height, width, 3]``.

    Args:
        image: one for all, one for each, or None; see ``frame_of``.

    Raises:
        ValueError: for another number of images, or what is none.
    """
    if image is None:
        return [None] * count
    given = list(image) if isinstance(image, (list, tuple)) else [image] * count
    if len(given) != count:
        raise ValueError(
            f"got {len(given)} images for {count} prompts; expected one for all, or one for each; "
            "pass as many"
        )
    return [None if one is None else frame_of(one) for one in given]


def frame_of(image: Any) -> np.ndarray:
    """A PIL image, uint8 ``[height, width, 3]``, or a tensor ``[3, height, width]`` in [0, 1], as
    uint8 ``[1, height, width, 3]``.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(image, Image.Image):
        return np.array(image.convert("RGB"))[None]

    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3:
        if image.dtype == np.uint8:
            return image[None]
    elif isinstance(image, Tensor) and image.ndim == 3 and image.shape[0] == 3:
        is_scaled = image.is_floating_point() and image.min() >= 0 and image.max() <= 1
        if is_scaled:
            frame: np.ndarray = (image.float() * 255).round().byte().permute(1, 2, 0).cpu().numpy()
            return frame[None]

    found = type(image).__name__
    if isinstance(image, (np.ndarray, Tensor)):
        found += f" of {image.dtype}, {[*image.shape]}, from {image.min()} to {image.max()}"
    raise ValueError(
        f"got {found} as image; expected a PIL image, an array uint8 [height, width, 3] or a "
        "tensor [3, height, width] in [0, 1]; convert it"
    )


def warn_of_sizes(images: Sequence[np.ndarray | None], size: tuple[int, int]) -> None:
    """Log each size of images that are resized and cropped, as the sampler does with references."""
    sizes = dict.fromkeys(image.shape[1:3] for image in images if image is not None)
    for found in sizes:
        if found != size:
            logger.warning(
                "an image of %dx%d pixels is resized and cropped to %dx%d", *found, *size
            )


def check_output_type(output_type: str) -> None:
    """Raise ValueError for a type that is not one of ``OUTPUT_TYPES``."""
    if output_type not in OUTPUT_TYPES:
        raise ValueError(
            f"got output_type {output_type!r}; expected one of {OUTPUT_TYPES}; choose one"
        )


def as_output(videos: Sequence[np.ndarray], output_type: str) -> Any:
    """uint8 videos ``[F, height, width, 3]`` in the type that was asked for.

    "pil" are lists of images, "np" float32 ``[B, F, height, width, 3]`` and "pt" float32
    ``[B, F, 3, height, width]``, both in [0, 1].
    """
    if output_type == "pil":
        return [[Image.fromarray(frame) for frame in video] for video in videos]
    scaled = np.stack(videos).astype(np.float32) / 255
    return scaled if output_type == "np" else torch.from_numpy(scaled).permute(0, 1, 4, 2, 3)
