"""The sampler of this package, fed by the arguments of a diffusers pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opensora_sp.data import to_clip
from opensora_sp.models import Text
from opensora_sp.sampling.conditioning import Insertion, Prompt
from opensora_sp.sampling.pipeline import Pipeline, PlacedReferences
from opensora_sp.sampling.requests import Request

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
        draw: makes all noise but that of ``latents``.
        latents: the noise ``[c, f, h, w]`` to begin with, or None.
    """

    draw: Draw
    latents: Tensor | None = None

    def noise(self, shape: tuple[int, ...], purpose: str, *counters: int, loop: int) -> Tensor:
        """Standard normal numbers, of the latents where they were given."""
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
        clip = to_clip(prompt.frames, size)
        latents = self.vae.encode(clip[None].to(self.device))[0].to(self.dtype)
        return PlacedReferences([latents], [Insertion()])

    def encode(self, batch: Sequence[Request], loop: int = 0, *, copies: int | None = None) -> Text:
        """As the base class; an autoencoder that is offloaded leaves the device before.

        accelerate's hooks expect it at the end, and it has encoded images.
        """
        self.vae.leave_device()
        return super().encode(batch, loop, copies=copies)


class Hooked:
    """A component whose methods run accelerate's hook first, which brings its weights.

    accelerate hooks ``forward`` alone. diffusers decorates the other methods of its own models in
    the same way (``apply_forward_hook``).
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
        value = getattr(self._module, name)
        hook = getattr(self._module, "_hf_hook", None)
        if name not in self._methods or hook is None:
            return value

        def called(*args: Any, **kwargs: Any) -> Any:
            hook.pre_forward(self._module)
            return value(*args, **kwargs)

        return called


def prompts_of(prompt: Any) -> list[str]:
    """A text, or one for each video, as a list.

    Raises:
        ValueError: for anything else, or no text.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(prompts, Sequence) and prompts and all(isinstance(one, str) for one in prompts):
        return list(prompts)
    raise ValueError(
        f"got {prompt!r:.80} as prompt; expected a text, or a list with one for each video; pass "
        "at least one"
    )


def check_generators(generators: Sequence[Any]) -> None:
    """Raise ValueError for anything but generators of torch and None."""
    for one in generators:
        if not isinstance(one, torch.Generator | None):
            raise ValueError(
                f"got {one!r:.80} as generator; expected a torch.Generator, or a list with one for "
                "each video; write torch.Generator().manual_seed(SEED) for a seed"
            )


def check_same_length(name: str, values: Sequence[Any], count: int) -> None:
    """Raise ValueError unless there is a value for each of ``count`` prompts."""
    if len(values) != count:
        raise ValueError(
            f"got {len(values)} of {name} for {count} prompts; expected one for each; pass as many"
        )
