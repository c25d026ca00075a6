"""What the training and sampling runs ask of a video autoencoder and of a text encoder."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class LatentEncoder(Protocol):
    """Videos ``[B, 3, F, height, width]`` in [-1, 1] to latents ``[B, c, f, h, w]`` and back."""

    channels: int

    def encode(self, video: Tensor) -> Tensor: ...

    def decode(self, latents: Tensor, *, num_frames: int) -> Tensor: ...

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]: ...

    def to(self, device: torch.device) -> LatentEncoder: ...


@runtime_checkable
class TextEncoder(Protocol):
    """Captions to features ``[B, 1, L, width]`` and a mask ``[B, L]``, 1 for tokens in use."""

    width: int
    max_length: int

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]: ...

    def to(self, device: torch.device) -> TextEncoder: ...
