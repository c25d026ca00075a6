"""The interface of diffusion processes for training and sampling, and classifier-free guidance.

Legend: B samples, c latent channels, F latent frames, h x w latent size, N timesteps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Prediction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``predict(x [B, c, F, h, w], t [B], x_mask [B, F] or None)`` -> ``[B, C_out, F, h, w]``."""
EditStep = Callable[[int, Tensor, Tensor], Tensor]
"""``edit_step(number of the step, t [B], latents after it)`` -> the latents to continue with."""


@dataclass(frozen=True)
class Geometry:
    """Size of each sample for a timestep transform, each ``[B]``.

    Attributes:
        height, width: in pixels.
        num_frames: frames of the latent or of the video; see ``RectifiedFlow.geometry``.
    """

    height: Tensor
    width: Tensor
    num_frames: Tensor


@dataclass(frozen=True, kw_only=True)
class Noised:
    """A noised batch, with the targets of the loss.

    Attributes:
        x_t: the network's input, ``[B, c, F, h, w]``.
        target: the training target, ``[B, c, F, h, w]``.
        x_start: the data that was noised, ``[B, c, F, h, w]``.
        t: timesteps of the process, ``[B]``.
        x_mask: bool ``[B, F]``, False for conditioning frames.
        video_mask: bool ``[B, F, h, w]``, False outside of a clip that is smaller than the batch.
        conditioning_frames: their numbers, where they are predicted as the others are, but with a
            weight of their own (Open-Sora 1.3).
    """

    x_t: Tensor
    target: Tensor
    x_start: Tensor
    t: Tensor
    x_mask: Tensor | None
    video_mask: Tensor | None = None
    conditioning_frames: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        process: DiffusionProcess,
        x_start: Tensor,
        noise: Tensor,
        t: Tensor,
        x_mask: Tensor | None,
        conditioning_frames: Sequence[int] = (),
        true: Tensor | None = None,
    ) -> Noised:
        """Noise a batch ``[B, c, F, h, w]`` up to t ``[B]``, but for its conditioning frames.

        The target leads to the data; with ``true`` to that, where ``x_start`` is degraded.
        """
        x_t = process.noisy_input(x_start, noise, t, x_mask)
        return cls(
            x_t=x_t,
            target=process.target(x_start if true is None else true, noise),
            x_start=x_start,
            t=t,
            x_mask=x_mask,
            conditioning_frames=conditioning_frames,
        )


class DiffusionProcess(Protocol):
    """Timesteps, forward process, loss and sampler; random numbers are arguments."""

    @property
    def num_sampling_steps(self) -> int:
        """Number of calls of the model in sampling, each on a doubled batch with guidance."""

    def check_channels(self, in_channels: int, out_channels: int) -> None:
        """Raise ValueError if a model of these channels does not predict what the process needs."""

    def geometry(
        self, height: Tensor, width: Tensor, *, latent_frames: int, video_frames: int
    ) -> Geometry:
        """The geometry of samples of this size in pixels, each ``[B]``."""

    def timesteps_from(self, uniform: Tensor, geometry: Geometry | None = None) -> Tensor:
        """Training timesteps ``[B]`` from uniform numbers in [0, 1) ``[B]``."""

    def network_time(self, t: Tensor) -> Tensor:
        """The network's timestep input ``[B]`` at t."""

    def noisy_input(
        self, x_start: Tensor, noise: Tensor, t: Tensor, x_mask: Tensor | None = None
    ) -> Tensor:
        """The network's input, ``[B, c, F, h, w]``."""

    def target(self, x_start: Tensor, noise: Tensor) -> Tensor:
        """The training target, ``[B, c, F, h, w]``."""

    def losses(self, prediction: Tensor | Any, noised: Noised) -> Tensor:
        """Each sample's loss ``[B]`` for a whole output; for a ``Shard``, this rank's part."""

    cfg_scale: float

    def guide(self, model: Callable[..., Tensor], **inputs: Any) -> Prediction:
        """The guided prediction of one ``sample``; ``inputs`` are for the doubled batch."""

    def sample(
        self,
        predict: Prediction,
        z: Tensor,
        *,
        geometry: Geometry | None = None,
        frame_levels: Tensor | None = None,
        draw_noise: Callable[[int], Tensor] | None = None,
        on_step: Callable[[], object] | None = None,
        edit_step: EditStep | None = None,
    ) -> Tensor:
        """Sample data from noise ``z [B, c, F, h, w]``; ``draw_noise(k)`` is the k-th draw."""


def predictions_per_step(process: DiffusionProcess, *, by_frames: bool) -> int:
    """Predictions that a sampling step makes of each sample: by how much guidance enlarges a batch.

    Args:
        by_frames: whether conditioning frames guide (``image_guidance.py``). This takes three,
            whatever the scales; guidance by text alone takes two, and a ``cfg_scale`` of 1 one.
    """
    if by_frames:
        return 3
    return 1 if process.cfg_scale == 1 else 2


def unguided(model: Callable[..., Tensor], **inputs: Any) -> Prediction:
    """The conditional prediction alone: guidance of scale 1 at half the cost."""
    return lambda x, t, x_mask: model(x, t, x_mask=x_mask, **inputs).to(x.dtype)


def guided(
    model: Callable[..., Tensor],
    scale: float,
    *,
    channels: int | None = None,
    **inputs: Any,
) -> Prediction:
    """Classifier-free guidance (Ho & Salimans, 2022) over a doubled batch, conditional half first.

    Args:
        model: called as ``model(x, t, **inputs)`` on the doubled batch.
        scale: 1 is the conditional prediction alone.
        channels: number of output channels that are guided, by default those of x. Further ones,
            such as a learned variance, are those of the conditional half.
        inputs: further model inputs for the doubled batch, such as ``drop_caption [2 * B]``.
    """

    def predict(x: Tensor, t: Tensor, x_mask: Tensor | None) -> Tensor:
        doubled_mask = None if x_mask is None else torch.cat([x_mask, x_mask])
        out = model(torch.cat([x, x]), torch.cat([t, t]), x_mask=doubled_mask, **inputs)
        guided_channels = [x.shape[1] if channels is None else channels]
        conditional, unconditional = out.to(x.dtype).chunk(2)
        conditional, rest = conditional.tensor_split(guided_channels, dim=1)
        unconditional, _ = unconditional.tensor_split(guided_channels, dim=1)
        return torch.cat([unconditional + scale * (conditional - unconditional), rest], dim=1)

    return predict


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """``[B]`` -> ``[B, 1, ..]`` with as many dims as ``like``."""
    return values.view(-1, *[1] * (like.ndim - 1))


def by_frame(mask: Tensor) -> Tensor:
    """``[B, F]`` -> ``[B, 1, F, 1, 1]``."""
    return mask[:, None, :, None, None]
