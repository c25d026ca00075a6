"""The interface of diffusion processes for training and sampling.

Legend: B samples, c latent channels, F latent frames, h x w latent size, N timesteps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor

from opensora_sp.models.conditions import sample_numbers

# Types of options, by which configs check them.
Positive = Annotated[int, Field(ge=1)]
Factor = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
GuidanceScale = Annotated[float, Field(ge=0, le=1000)]
NumSteps = Annotated[int, Field(ge=1, le=100_000)]
Prediction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``predict(x [B, c, F, h, w], t [B], x_mask [B, F] or None)`` -> ``[B, C_out, F, h, w]``."""
OnStep = Callable[[int, Tensor, Tensor], Tensor | None]
"""``on_step(number of the step, t [B], latents)`` -> latents to continue with instead, or None."""


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
        """Number of calls of the model in sampling; guidance enlarges their batches."""

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
        """The guided prediction of one ``sample``; ``inputs`` are for the enlarged batch."""

    def sample(
        self,
        predict: Prediction,
        z: Tensor,
        *,
        geometry: Geometry | None = None,
        frame_levels: Tensor | None = None,
        draw_noise: Callable[[int], Tensor] | None = None,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Sample data from noise ``z [B, c, F, h, w]``; ``draw_noise(k)`` is the k-th draw."""


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """``[B]`` -> ``[B, 1, ..]`` with as many dims as ``like``."""
    return values.view(-1, *[1] * (like.ndim - 1))


def by_frame(mask: Tensor) -> Tensor:
    """``[B, F]`` -> ``[B, 1, F, 1, 1]``."""
    return mask[:, None, :, None, None]


def size_conditions(
    process: DiffusionProcess,
    sample_inputs: Iterable[str],
    shape: tuple[int, int, int],
    fps: Tensor,
    *,
    latent_frames: int,
) -> tuple[Geometry, dict[str, Tensor]]:
    """Inputs of a timestep transform and of a model for the sizes of B clips of one shape.

    Args:
        sample_inputs: the names of the numbers that the model takes,
            ``model_class(...).sample_inputs``.
        shape: frames, height and width of the video.
        fps: frames per second ``[B]``; the results are on its device.
        latent_frames: frames of the latents.

    Returns:
        The geometry for the process's timesteps, and the model's keyword arguments, each ``[B]``.
    """
    num_frames, *sides = shape
    height, width = (torch.full((len(fps),), float(side), device=fps.device) for side in sides)
    geometry = process.geometry(height, width, latent_frames=latent_frames, video_frames=num_frames)
    numbers = sample_numbers(
        sample_inputs, height=height, width=width, fps=fps, num_frames=num_frames
    )
    return geometry, numbers
