"""Sources of latents and text features: encoders, perhaps of degraded clips, or a feature cache.

Legend: c latent channels, f x h x w latent size, L text tokens, W their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from opensora_sp.common.tensors import to_device
from opensora_sp.data.cache import CachedClip, CachedFeatures
from opensora_sp.data.dataset import Clip, ClipShape
from opensora_sp.data.randomness import generator
from opensora_sp.data.transforms import Degradation, Kind, scale
from opensora_sp.encoders import independent_pieces
from opensora_sp.encoders.interface import Piece


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
        lengths = [clip.video.shape[1] for clip in items]
        made: dict[int, Tensor] = {}
        for length in sorted(set(lengths)):
            places = [place for place in range(len(items)) if lengths[place] == length]
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
        y, mask = self.text_encoder.encode([clip.text for clip in items])
        y = y.to(self.device)[:, 0]
        return [features[:length] for features, length in zip(y, mask.sum(1).tolist(), strict=True)]


class DegradedClips(Encoders):
    """A ``Source`` that encodes videos twice: as they were degraded, and as they are.

    Draws depend on seed, epoch and clip. Clips are encoded whole, since a clip
    is downsampled over all of its frames. Images stay as they are.

    Args:
        prob, strength: of each kind of degradation, see ``check_degradation``.
    """

    def __init__(
        self, plain: Encoders, seed: int, prob: Mapping[Kind, float], strength: Mapping[Kind, Any]
    ) -> None:
        super().__init__(plain.vae, plain.text_encoder, plain.device)
        self.plain, self.seed, self.prob, self.strength = plain, seed, prob, strength
        self.carried = 2 * self.channels

    def pieces(self, shape: ClipShape) -> list[Piece]:
        return [Piece(slice(0, shape.num_frames), slice(0, self.latent_size(shape)[0]))]

    def latents(self, items: Sequence[Clip]) -> list[Tensor]:
        """Latents of each clip ``[2 * c, f, h, w]``: degraded, then true."""
        pairs = zip(items, self.plain.latents(items), strict=True)
        return [torch.cat([self._degraded(clip, clean), clean]) for clip, clean in pairs]

    def _degraded(self, clip: Clip, clean: Tensor) -> Tensor:
        # Images are not degraded in the release.
        if clip.video.shape[1] == 1:
            return clean

        rng = generator(self.seed, "noise_augmentation", *clip.key)
        drawn = Degradation.draw(self.prob, self.strength, rng)
        if drawn.keeps_pixels:
            return drawn.of_latents(clean)
        video = drawn.of_pixels(scale(to_device(clip.video[None], self.device)))
        latents: Tensor = self.vae.encode(video).float()[0]
        return drawn.of_latents(latents)


class CachedSource:
    """A ``Source`` of ``CachedClip``s: nothing is encoded, every latent frame is a piece."""

    def __init__(self, dataset: CachedFeatures, device: torch.device) -> None:
        self.dataset, self.sizes, self.device = dataset, dataset.sizes, device
        source = dataset.index.source
        self.channels = self.carried = source["channels"]
        self.width = source["width"]
        self.max_length = source["max_length"]

    def latent_size(self, shape: ClipShape) -> tuple[int, int, int]:
        return self.sizes[shape]

    def pieces(self, shape: ClipShape) -> list[Piece]:
        return [Piece(slice(i, i + 1), slice(i, i + 1)) for i in range(self.latent_size(shape)[0])]

    def latents(self, items: Sequence[CachedClip]) -> list[Tensor]:
        return [to_device(clip.latents, self.device).float() for clip in items]

    def text_lengths(self, clips: Sequence[int], captions: Sequence[str]) -> list[int]:
        return [self.dataset.text_length(clip) for clip in clips]

    def text_features(self, items: Sequence[CachedClip]) -> list[Tensor]:
        texts = [clip.text for clip in items if clip.text is not None]
        return [to_device(text, self.device).float() for text in texts]
