"""Latents of degraded clips beside those of the true ones (``noise_augmentation``).

Legend: c latent channels, f x h x w latent size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.tensors import to_device
from opensora_sp.data import Clip, ClipShape, scale
from opensora_sp.data.degradation import Degradation
from opensora_sp.data.randomness import generator
from opensora_sp.encoders import Piece

from .sources import Encoders


class DegradedClips(Encoders):
    """A ``Source`` that encodes videos twice: as they were degraded, and as they are.

    What is drawn for a clip depends on seed, epoch and clip. Clips are encoded whole, since a clip
    is downsampled over all of its frames. Images stay as they are.

    Args:
        plain: the encoders.
        prob, strength: of each kind of degradation, see ``check_degradation``.
    """

    def __init__(
        self, plain: Encoders, seed: int, prob: Mapping[str, float], strength: Mapping[str, Any]
    ) -> None:
        super().__init__(plain.vae, plain.text_encoder, plain.device)
        self.plain, self.seed, self.prob, self.strength = plain, seed, prob, strength
        self.carried = 2 * self.channels

    def pieces(self, shape: ClipShape) -> list[Piece]:
        return [Piece(slice(0, shape.num_frames), slice(0, self.latent_size(shape)[0]))]

    def latents(self, items: Sequence[Clip]) -> list[Tensor]:
        """Of each clip ``[2 * c, f, h, w]``: degraded, then true."""
        clean = self.plain.latents(items)
        return [torch.cat([self._degraded(*one), one[1]]) for one in zip(items, clean, strict=True)]

    def _degraded(self, item: Clip, clean: Tensor) -> Tensor:
        if item.video.shape[1] == 1:
            return clean

        rng = generator(self.seed, "noise_augmentation", *item.key)
        drawn = Degradation.draw(self.prob, self.strength, rng)
        if drawn.keeps_pixels:
            return drawn.of_latents(clean)
        video = drawn.of_pixels(scale(to_device(item.video[None], self.device)))
        latents: Tensor = self.vae.encode(video).float()[0]
        return drawn.of_latents(latents)
