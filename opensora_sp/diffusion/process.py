"""What the training run and the pipeline need of a diffusion process, whichever it is.

Legend: B samples, c latent channels, F latent frames, h x w latent size, N timesteps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Prediction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``predict(x [B, c, F, h, w], t [B], x_mask [B, F] or None)`` -> the network's output ``[B, C_out,
F, h, w]``.
"""


@dataclass(frozen=True)
class Geometry:
    """What a timestep transform needs of each sample, each ``[B]``: pixel size, and frames of the
    latent or the video.

    ``RectifiedFlow.geometry`` fills in the frames that it counts.
    """

    height: Tensor
    width: Tensor
    num_frames: Tensor


@dataclass(frozen=True, kw_only=True)
class Noised:
    """A batch on its way from data to noise, with what the loss compares a prediction with."""

    x_t: Tensor  # [B, c, F, h, w], what the network sees
    target: Tensor  # [B, c, F, h, w], what it learns to predict
    x_start: Tensor  # [B, c, F, h, w]
    t: Tensor  # [B], timesteps of the process
    x_mask: Tensor | None  # bool [B, F], False for frames that are given
    video_mask: Tensor | None = (
        None  # bool [B, F, h, w], False outside of a clip that is smaller than the batch
    )

    @classmethod
    def of(
        cls,
        process: DiffusionProcess,
        x_start: Tensor,
        noise: Tensor,
        t: Tensor,
        x_mask: Tensor | None,
    ) -> Noised:
        """Noise a batch ``[B, c, F, h, w]`` up to t ``[B]``; frames with ``x_mask`` False are
        given.
        """
        x_t = process.noisy_input(x_start, noise, t, x_mask)
        return cls(
            x_t=x_t, target=process.target(x_start, noise), x_start=x_start, t=t, x_mask=x_mask
        )


class DiffusionProcess(Protocol):
    """Timesteps, forward process, loss and sampler. It draws nothing itself: random numbers are
    arguments.
    """

    @property
    def num_sampling_steps(self) -> int:
        """Calls of the model, each on a doubled batch, that sampling takes."""

    def check_channels(self, in_channels: int, out_channels: int) -> None:
        """Raise ValueError if a model of these channels does not predict what the process needs."""

    def geometry(
        self, height: Tensor, width: Tensor, *, latent_frames: int, video_frames: int
    ) -> Geometry:
        """What ``timesteps_from`` and ``sample`` want to know of samples of this size in pixels,
        each ``[B]``.
        """

    def timesteps_from(self, uniform: Tensor, geometry: Geometry | None = None) -> Tensor:
        """Training timesteps ``[B]`` from uniform numbers in [0, 1) ``[B]``."""

    def network_time(self, t: Tensor) -> Tensor:
        """The timestep ``[B]`` that the network is told at t."""

    def noisy_input(
        self, x_start: Tensor, noise: Tensor, t: Tensor, x_mask: Tensor | None = None
    ) -> Tensor:
        """What the network sees, ``[B, c, F, h, w]``."""

    def target(self, x_start: Tensor, noise: Tensor) -> Tensor:
        """What the network learns to predict, ``[B, c, F, h, w]``."""

    def losses(self, prediction: Tensor | Any, noised: Noised) -> Tensor:
        """Each sample's loss ``[B]`` for a model's whole output; for a ``Shard`` the part of it
        that is held here.
        """

    cfg_scale: float

    def guide(
        self, model: Callable[..., Tensor], *, drop_caption: Tensor | None = None, **inputs: Any
    ) -> Prediction:
        """The guided prediction of a model; ``drop_caption`` and ``inputs`` are for the doubled
        batch.
        """

    def sample(
        self,
        predict: Prediction,
        z: Tensor,
        *,
        geometry: Geometry | None = None,
        frame_levels: Tensor | None = None,
        draw_noise: Callable[[int], Tensor] | None = None,
        on_step: Callable[[], object] | None = None,
    ) -> Tensor:
        """From noise ``z`` ``[B, c, F, h, w]`` to data; ``draw_noise(k)`` is the k-th draw of the
        loop.
        """


def unguided(model: Callable[..., Tensor], **inputs: Any) -> Prediction:
    """The captioned prediction alone, which guidance of scale 1 comes to; half the work."""
    return lambda x, t, x_mask: model(x, t, x_mask=x_mask, **inputs).to(x.dtype)


def guided(
    model: Callable[..., Tensor],
    scale: float,
    *,
    drop_caption: Tensor | None = None,
    channels: int | None = None,
    **inputs: Any,
) -> Prediction:
    """Classifier-free guidance (Ho & Salimans, 2022) over a doubled batch, captioned half first.

    Args:
        model: called as ``model(x, t, **inputs)`` on the doubled batch.
        scale: 1 is the captioned prediction alone.
        drop_caption: bool ``[2 * B]``, passed to the model; None with text that was encoded ahead.
        channels: how many of the first output channels to guide, by default as many as x has;
            further ones, such as a learned variance, are those of the captioned half.
        inputs: further model inputs for the doubled batch.
    """

    def predict(x: Tensor, t: Tensor, x_mask: Tensor | None) -> Tensor:
        x2, t2 = torch.cat([x, x]), torch.cat([t, t])
        mask2 = None if x_mask is None else torch.cat([x_mask, x_mask])
        out = model(x2, t2, x_mask=mask2, drop_caption=drop_caption, **inputs)
        captioned, plain = out.to(x.dtype).chunk(2)
        first = slice(x.shape[1] if channels is None else channels)
        moved = plain[:, first] + scale * (captioned[:, first] - plain[:, first])
        return torch.cat([moved, captioned[:, first.stop :]], dim=1)

    return predict


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """``[B]`` -> ``[B, 1, ..]`` with as many dims as ``like``."""
    return values.view(-1, *[1] * (like.ndim - 1))


def by_frame(mask: Tensor) -> Tensor:
    """``[B, F]`` -> ``[B, 1, F, 1, 1]``."""
    return mask[:, None, :, None, None]
