"""The interfaces of video autoencoders and text encoders.

Legend: B samples, F frames of video, c latent channels, f x h x w latent size, L text tokens.

A config can name any class with these members, ``vae=dict(type="my_package.MyVAE", ...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class LatentEncoder(Protocol):
    """Videos ``[B, 3, F, height, width]`` in [-1, 1] to latents ``[B, c, f, h, w]`` float32, and
    back.

    Both directions take and return tensors on the device of ``to``. Latents are ``(z - shift) /
    scale`` of what the network itself yields, ``z``, so that the diffusion model sees numbers of
    about unit size.

    Two attributes, which may be left out, say how a clip falls into parts that depend on nothing
    else (``independent_pieces``): ``chunk_frames`` and ``chunk_latent_frames``, the frames and
    latent frames of such a part. 1 and 1 mean that every frame stands alone; None (the default)
    that a clip is one whole. Where frames stand alone, ``micro_batch_size`` says how many are
    decoded by one call, None for all; 1 where it is left out. ``chunk_overlap``, by default 0, are
    the frames that a part shares with the one before it.

    A class whose construction loads weights gives a classmethod ``planned_latent_size(num_frames,
    height, width, **options)`` as well as ``latent_size``, which the planner calls instead.
    """

    channels: int
    scale: float | Tensor

    def encode(self, video: Tensor) -> Tensor: ...

    def decode(self, latents: Tensor, *, num_frames: int) -> Tensor: ...

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]: ...

    def to(self, device: torch.device) -> LatentEncoder: ...


@runtime_checkable
class TextEncoder(Protocol):
    """Captions to features ``[B, 1, L, width]`` float32 and their lengths as a mask ``[B, L]``
    int64.

    ``L`` is ``max_length``. The mask is 1 for tokens in use, which come first: a caption's length
    is its row's sum, and that is ``min(num_tokens(text), max_length)``. The mask lies on the CPU,
    so that nobody waits for a device to know how long a text is.
    """

    width: int
    max_length: int

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]: ...

    def num_tokens(self, text: str) -> int:
        """Tokens of a caption before ``encode`` truncates it to ``max_length``."""

    def to(self, device: torch.device) -> TextEncoder: ...


@dataclass(frozen=True)
class Piece:
    """A part of a clip that is encoded and decoded without the rest: its frames, and the latent
    frames it stands for.

    For every piece, and for every run of neighbouring ones taken from the first's start to the
    last's stop, ``encode(video[:, :, frames])`` is ``encode(video)[:, :, latents]``, and
    ``decode(z[:, :, latents], num_frames=frames.stop - frames.start)`` is ``decode(z,
    num_frames=F)[:, :, frames]``. Where neighbours share frames, the latter holds of the others,
    and the whole has the mean of both.
    """

    frames: slice
    latents: slice


def independent_pieces(vae: Any, *, num_frames: int, latent_frames: int) -> list[Piece]:
    """The parts of a clip that ``vae`` encodes and decodes independently, in order.

    Args:
        vae: a ``LatentEncoder``.
        latent_frames: latent frames of the clip, ``vae.latent_size(...)[0]`` or
            ``latents.shape[2]``.

    Raises:
        ValueError: if the clip has another number of parts than its latents.
    """
    step = getattr(vae, "chunk_frames", None)
    latent_step = getattr(vae, "chunk_latent_frames", None)
    if step is None or latent_step is None:
        return [Piece(slice(0, num_frames), slice(0, latent_frames))]

    frames = chunks(num_frames, step, getattr(vae, "chunk_overlap", 0))
    latents = chunks(latent_frames, latent_step)
    if len(frames) != len(latents):
        raise ValueError(
            f"got {num_frames} frames and {latent_frames} latent frames, which are {len(frames)} "
            f"and {len(latents)} chunks of {step} and {latent_step}; expected as many; pass the "
            "frame count that the latents were made of"
        )
    return [Piece(*piece) for piece in zip(frames, latents, strict=True)]


def decoded_pieces(vae: Any, num_frames: int, latent_frames: int) -> list[Piece]:
    """The pieces of a clip that are decoded by one call each.

    Frames that stand alone are decoded in batches of the autoencoder's ``micro_batch_size`` (None:
    all).
    """
    pieces = independent_pieces(vae, num_frames=num_frames, latent_frames=latent_frames)
    if getattr(vae, "chunk_frames", None) != 1:
        return pieces
    size = getattr(vae, "micro_batch_size", 1) or num_frames
    return [Piece(frames, frames) for frames in chunks(num_frames, size)]


def frames_of(
    latent_size: Callable[..., tuple[int, int, int]],
    latent_frames: int,
    num_frames: int,
    size: tuple[int, int],
) -> int:
    """Most frames of a video, up to ``num_frames``, that ``latent_frames`` encode."""
    counts = range(1, num_frames + 1)
    return max((n for n in counts if latent_size(n, *size)[0] <= latent_frames), default=0)


def chunks(count: int, size: int, overlap: int = 0) -> list[slice]:
    """Consecutive slices of ``count`` entries, each of ``size`` but perhaps the last.

    Neighbours have ``overlap`` entries in common.
    """
    # At least one, also of a clip that is shorter than the overlap.
    starts = range(0, max(count - overlap, 1), size - overlap)
    return [slice(start, min(start + size, count)) for start in starts]


def check_latent_frames(latents: Tensor, num_frames: int, expected: int) -> None:
    """Raise ValueError unless latents ``[B, c, f, h, w]`` have ``expected`` latent frames."""
    if latents.shape[2] != expected:
        raise ValueError(
            f"got {latents.shape[2]} latent frames to decode to {num_frames} frames; expected "
            f"{expected}; pass the frame count that the latents were made of"
        )
