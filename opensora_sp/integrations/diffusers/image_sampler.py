"""The sampler of this package, with the arguments and outputs of a diffusers pipeline.

Legend: B videos, F frames, c latent channels, f x h x w latent size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from opensora_sp.data.transforms import to_clip
from opensora_sp.models import Text
from opensora_sp.sampling.pipeline import Pipeline, PlacedReferences
from opensora_sp.sampling.prompts import Prompt
from opensora_sp.sampling.reference_frames import Insertion
from opensora_sp.sampling.requests import Request

logger = logging.getLogger(__name__)
OUTPUT_TYPES = ("pil", "np", "pt", "latent")
Draw = Callable[[tuple[int, ...]], Tensor]
"""Standard normal numbers of a shape."""


@dataclass(frozen=True)
class ImagePrompt(Prompt):
    """A caption and frames ``[F, height, width, 3]``, uint8, that the video begins with."""

    frames: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class GeneratedRequest(Request):
    """A request whose noise a torch generator draws.

    Attributes:
        draw: makes all noise but ``latents``.
        latents: the noise ``[c, f, h, w]`` to begin with, or None.
    """

    draw: Draw
    latents: Tensor | None = None

    def noise(self, shape: tuple[int, ...], purpose: str, *counters: int, loop: int) -> Tensor:
        """Standard normal numbers, or the ``latents`` that were passed."""
        if purpose == "sample" and self.latents is not None:
            return self.latents
        return self.draw(shape)


class ImageSampler(Pipeline):
    """The sampler, with conditioning images in memory instead of files."""

    @torch.no_grad()
    def conditioning(self, prompt: Prompt, size: tuple[int, int]) -> PlacedReferences:
        """Encode a prompt's frames, resized to the video's (height, width)."""
        if not isinstance(prompt, ImagePrompt) or prompt.frames is None:
            return PlacedReferences([], [])
        height_and_width = prompt.frames.shape[1:3]
        if height_and_width != size:
            logger.warning(
                "an image of %dx%d pixels is resized and cropped to %dx%d", *height_and_width, *size
            )
        clip = to_clip(prompt.frames, size)
        latents = self.vae.encode(clip[None].to(self.device))[0].to(self.dtype)
        return PlacedReferences([latents], [Insertion()])

    def encode(self, batch: Sequence[Request], loop: int = 0, *, copies: int | None = None) -> Text:
        """Encode texts as the base class does; an offloaded autoencoder leaves the device first.

        accelerate's hooks expect it at the end, and it has encoded images.
        """
        self.vae.leave_device()
        return super().encode(batch, loop, copies=copies)


class Hooked:
    """A component whose methods run accelerate's hook first, which brings its weights.

    accelerate hooks ``forward`` alone. diffusers decorates the other methods of its models in the
    same way (``apply_forward_hook``).
    """

    def __init__(self, module: nn.Module, *methods: str) -> None:
        self._module, self._methods = module, methods

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def leave_device(self) -> None:
        """Free the device, if the component is offloaded."""
        if hasattr(self._module, "_hf_hook"):
            self._module.to("cpu")

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._module, name)
        hook = getattr(self._module, "_hf_hook", None)
        if name not in self._methods or hook is None:
            return attribute

        def called(*args: Any, **kwargs: Any) -> Any:
            hook.pre_forward(self._module)
            return attribute(*args, **kwargs)

        return called


def texts_of(prompt: Any) -> list[str]:
    """A text, or one for each video, as a list.

    Raises:
        ValueError: for anything else, or no text.
    """
    texts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
        return list(texts)
    raise ValueError(
        f"got {prompt!r:.80} as prompt; expected a text, or a list with one for each video; pass "
        "at least one"
    )


def one_each(name: str, argument: Any, count: int) -> list[Any]:
    """An argument for each of ``count`` videos: the entries of a list, or the same for all.

    Raises:
        ValueError: for a list of another length.
    """
    listed = list(argument) if isinstance(argument, (list, tuple)) else [argument] * count
    if len(listed) != count:
        raise ValueError(
            f"got {len(listed)} of {name} for {count} prompts; expected one for all, or one for "
            "each; pass as many"
        )
    return listed


def frame_of(image: Any) -> np.ndarray | None:
    """An image as uint8 ``[1, height, width, 3]``; None for None.

    Args:
        image: of PIL, uint8 ``[height, width, 3]``, or a tensor ``[3, height, width]`` in [0, 1].

    Raises:
        ValueError: for anything else.
    """
    if image is None:
        return None
    if isinstance(image, Image.Image):
        return np.array(image.convert("RGB"))[None]

    if isinstance(image, np.ndarray):
        if image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
            return image[None]
    elif isinstance(image, Tensor):
        is_image = image.is_floating_point() and image.ndim == 3 and image.shape[0] == 3
        if is_image and image.min() >= 0 and image.max() <= 1:
            return (image.float() * 255).round().byte().permute(1, 2, 0).cpu().numpy()[None]

    details = [getattr(image, name) for name in ("dtype", "shape") if hasattr(image, name)]
    shown = " ".join([type(image).__name__, *map(str, details)])
    raise ValueError(
        f"got {shown} as image; expected a PIL image, an array uint8 "
        "[height, width, 3] or a tensor [3, height, width] in [0, 1]; convert it"
    )


def as_output(videos: Sequence[np.ndarray], output_type: str) -> Any:
    """uint8 videos ``[F, height, width, 3]`` in the requested type.

    "pil" are lists of images, "np" float32 ``[B, F, height, width, 3]`` and "pt" float32
    ``[B, F, 3, height, width]``, both in [0, 1].
    """
    if output_type == "pil":
        return [[Image.fromarray(frame) for frame in video] for video in videos]
    scaled = np.stack(videos).astype(np.float32) / 255
    return scaled if output_type == "np" else torch.from_numpy(scaled).permute(0, 1, 4, 2, 3)
