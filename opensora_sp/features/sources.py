"""Sources of latents and text features: encoders, or a cache of what they computed.

Legend: c latent channels, f x h x w latent size, L text tokens, W their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from opensora_sp.common.tensors import to_device
from opensora_sp.data import Clip, ClipShape, scale
from opensora_sp.encoders import Piece, independent_pieces


class Source(Protocol):
    """Makes latents and text features of the items that a dataset reads."""

    channels: int
    carried: int  # numbers made for each latent position: c, or of a pair of latents 2 * c
    width: int
    max_length: int

    def latent_size(self, shape: ClipShape) -> tuple[int, int, int]:
        """f, h, w."""

    def pieces(self, shape: ClipShape) -> list[Piece]:
        """Parts of a clip that are encoded independently: frames, and their latent frames."""

    def latents(self, items: Sequence[Any]) -> list[Tensor]:
        """Latents of each clip, or part of one, ``[c, f', h, w]`` float32."""

    def text_lengths(self, clips: Sequence[int], captions: Sequence[str]) -> list[int]:
        """Tokens of the captions of some clips, at most L each, without making their features."""

    def text_features(self, items: Sequence[Any]) -> list[Tensor]:
        """Features of each caption, ``[tokens, W]`` float32."""


class Encoders:
    """A ``Source`` that encodes ``Clip``s with a VAE and a text encoder."""

    def __init__(self, vae: Any, text_encoder: Any, device: torch.device) -> None:
        self.vae, self.text_encoder, self.device = vae, text_encoder, device
        self.channels: int = vae.channels
        self.carried = self.channels
        self.width: int = text_encoder.width
        self.max_length: int = text_encoder.max_length

    def latent_size(self, shape: ClipShape) -> tuple[int, int, int]:
        frames, height, width = self.vae.latent_size(*shape)
        return frames, height, width

    def pieces(self, shape: ClipShape) -> list[Piece]:
        latent_frames = self.latent_size(shape)[0]
        return independent_pieces(
            self.vae, num_frames=shape.num_frames, latent_frames=latent_frames
        )

    def latents(self, items: Sequence[Clip]) -> list[Tensor]:
        """Items of equal length are encoded together."""
        lengths = [item.video.shape[1] for item in items]
        made: dict[int, Tensor] = {}
        for length in sorted(set(lengths)):
            places = [place for place, found in enumerate(lengths) if found == length]
            videos = torch.stack([items[place].video for place in places])
            videos = to_device(videos, self.device)
            made |= zip(places, self.vae.encode(scale(videos)).float(), strict=True)
        return [made[place] for place in range(len(items))]

    def text_lengths(self, clips: Sequence[int], captions: Sequence[str]) -> list[int]:
        counts = [self.text_encoder.num_tokens(caption) for caption in captions]
        return [min(count, self.max_length) for count in counts]

    def text_features(self, items: Sequence[Clip]) -> list[Tensor]:
        if not items:
            return []
        y, mask = self.text_encoder.encode([item.text for item in items])
        y = y.to(self.device)[:, 0]
        return [features[:length] for features, length in zip(y, mask.sum(1).tolist(), strict=True)]
