"""Improved DDPM (Nichol & Dhariwal, 2021; Ho et al., 2020), as in Open-Sora 1.0 and 1.1.

The network predicts the noise in ``x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) noise``.
A second set of channels is the variance of the reverse step, interpolated between its lower and
upper bound. Timesteps t count the N steps after respacing, from 0 (data) to N - 1 (noise). The
network's input is the original step among ``diffusion_steps``.

Legend: B samples, c latent channels, F latent frames, h x w latent size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from opensora_sp.common.tensors import to_device

from .cached_steps import SamplingOptions
from .gaussian import Steps, discretised_nll, gaussian_kl, named_betas, respaced_steps
from .guidance import Guidance
from .loss import Positions
from .process import (
    Geometry,
    GuidanceScale,
    Noised,
    NumSteps,
    OnStep,
    Positive,
    Prediction,
    Share,
    by_frame,
)

BITS = 1 / math.log(2)  # per nat


@dataclass(frozen=True)
class ReverseStep:
    """The predicted distribution of ``x_{t-1}`` given ``x_t``; tensors of the shape of ``x_t``."""

    x_start: Tensor
    mean: Tensor
    log_variance: Tensor


@dataclass(frozen=True, kw_only=True)
class IDDPM(SamplingOptions):
    """Timesteps, forward process, losses and samplers; options are named as in Open-Sora.

    Args:
        num_sampling_steps: number of evenly spaced steps, as ``timestep_respacing="n"``. 0
            takes that option, and is replaced by its number of steps. Training uses these steps
            only: set neither to train on all.
        timestep_respacing: "100", "10,15,20" or "ddim20"; see ``respaced_steps``.
        noise_schedule: "linear", or "squaredcos_cap_v2", the cosine schedule.
        diffusion_steps: steps before respacing.
        learn_sigma: the network predicts the variance in a second set of channels. Otherwise the
            variance is beta, or with ``sigma_small`` the posterior variance.
        predict_xstart: the network predicts the data, not the noise.
        use_kl: the loss is the variational bound, times the number of steps. Otherwise it is the
            squared error, plus with ``learn_sigma`` the bound (in bits) as a function of the
            variance alone.
        cfg_scale: scale of classifier-free guidance; 1 is the captioned prediction alone.
        cfg_channel: guide this many channels only; Open-Sora 1.0 guides 3 of 4. None guides all.
        sampler: "ancestral", or "ddim" (Song et al., 2020) with ``ddim_eta``: 0 draws no noise, 1
            as much as ancestral with ``sigma_small``.
        clip_denoised: clip predicted data to [-1, 1] while sampling; for pixels, not latents.
        table_dtype: precision in which the tables are computed. "float32" gives the numbers of
            Open-Sora 1.2, whose rounding errors in the last steps are up to 0.5 % of the loss.
            "float64" gives the numbers of 1.0.

    Raises:
        ValueError: for an unknown schedule, or values that do not fit together, and as of
            ``SamplingOptions``. Other values are checked where they come from a config, by their
            types.
    """

    num_sampling_steps: Annotated[int, Field(ge=0)] = 0
    timestep_respacing: str | None = None
    noise_schedule: str = "linear"
    diffusion_steps: NumSteps = 1000
    learn_sigma: bool = True
    sigma_small: bool = False
    predict_xstart: bool = False
    use_kl: bool = False
    cfg_scale: GuidanceScale = 4.0
    cfg_channel: Positive | None = None
    sampler: Literal["ancestral", "ddim"] = "ancestral"
    ddim_eta: Share = 0.0
    clip_denoised: bool = False
    table_dtype: Literal["float64", "float32"] = "float64"

    def __post_init__(self) -> None:
        super().__post_init__()
        requested, count = self.num_sampling_steps, len(self.timestep_map)
        if self.timestep_respacing and requested not in (0, count):
            raise ValueError(
                f"got num_sampling_steps {requested} and timestep_respacing "
                f"{self.timestep_respacing!r}, which makes {count} steps; expected one of the two, "
                "or the same number; remove num_sampling_steps"
            )
        object.__setattr__(self, "num_sampling_steps", count)

        self.steps  # noqa: B018  # raises for an unknown schedule

    @cached_property
    def timestep_map(self) -> Tensor:
        """The original step among ``diffusion_steps`` of each step, int64 ``[N]``."""
        spacing = self.timestep_respacing or str(self.num_sampling_steps or "")
        return torch.tensor(respaced_steps(self.diffusion_steps, spacing))

    @cached_property
    def steps(self) -> Steps:
        """The tables, each ``[N]``."""
        alpha_bar = (1 - named_betas(self.noise_schedule, self.diffusion_steps)).cumprod(0)
        return Steps.of(alpha_bar[self.timestep_map], getattr(torch, self.table_dtype))

    def check_channels(self, in_channels: int, out_channels: int) -> None:
        """Raise ValueError if a model lacks the variance channels that ``learn_sigma`` needs."""
        if self.learn_sigma and out_channels != 2 * in_channels:
            raise ValueError(
                f"got a scheduler with learn_sigma and a model with {out_channels} output channels "
                f"for {in_channels} of the latent; expected {2 * in_channels}; set "
                "model.pred_sigma=True, or scheduler.learn_sigma=False"
            )

    def geometry(
        self, height: Tensor, width: Tensor, *, latent_frames: int, video_frames: int
    ) -> Geometry:
        """Size of the samples, which this process does not depend on."""
        return Geometry(height, width, torch.full_like(height, latent_frames))

    def timesteps_from(self, uniform: Tensor, geometry: Geometry | None = None) -> Tensor:
        """Training timesteps, int64 ``[B]``, from uniform numbers in [0, 1) ``[B]``."""
        count = len(self.timestep_map)
        # In float32, the product may be rounded up to ``count``.
        return (uniform * count).long().clamp(max=count - 1)

    def network_time(self, t: Tensor) -> Tensor:
        """The network's input at t, the original step among ``diffusion_steps``, int64 ``[B]``."""
        return to_device(self.timestep_map, t.device)[t]

    def add_noise(self, x_start: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """``x_t`` for ``x_start`` and ``noise`` ``[B, c, F, h, w]`` at t int64 ``[B]``."""
        step = self.steps.at(t, x_start)
        return step.sqrt_alpha_bar * x_start + step.sqrt_one_minus_alpha_bar * noise

    def noisy_input(
        self, x_start: Tensor, noise: Tensor, t: Tensor, x_mask: Tensor | None = None
    ) -> Tensor:
        """The network's input ``x_t``; conditioning frames (``x_mask`` False) are at step 0."""
        x_t = self.add_noise(x_start, noise, t)
        if x_mask is None:
            return x_t

        conditioning = self.add_noise(x_start, noise, torch.zeros_like(t))
        return torch.where(by_frame(x_mask), x_t, conditioning)

    def target(self, x_start: Tensor, noise: Tensor) -> Tensor:
        """The training target of the first channels: the noise, or the data."""
        return x_start if self.predict_xstart else noise

    def losses(self, prediction: Tensor | Any, noised: Noised) -> Tensor:
        """Each sample's loss ``[B]``, the sum of its ``loss_terms``."""
        return torch.stack(list(self.loss_terms(prediction, noised).values())).sum(0)

    def loss_terms(self, prediction: Tensor | Any, noised: Noised) -> dict[str, Tensor]:
        """The terms "mse" and "vb" of the loss, as far as the options have them, each ``[B]``.

        Args:
            prediction: ``[B, C_out, F, h, w]``, or the ``Shard`` of it that this rank holds. The
                terms of all ranks' shards add up to the terms of the whole prediction.
        """
        local = Positions.of(
            prediction,
            noised.target,
            noised.x_start,
            noised.x_t,
            x_mask=noised.x_mask,
            video_mask=noised.video_mask,
        )
        target, x_start, x_t = local.tensors
        first, rest = local.predicted.tensor_split([target.shape[-1]], dim=-1)
        step = self.steps.at(noised.t[local.sample], x_t)

        terms = {}
        if not self.use_kl:
            terms["mse"] = local.means((target - first).square())

        if self.use_kl or self.learn_sigma:
            # In the hybrid loss the bound trains the variance alone.
            mean_part = first if self.use_kl else first.detach()
            bound = local.means(self._bound(step, mean_part, rest, x_start, x_t))
            if self.use_kl:
                bound = bound * len(self.timestep_map)
            terms["vb"] = bound

        return terms

    def _bound(
        self, step: Steps, first: Tensor, rest: Tensor, x_start: Tensor, x_t: Tensor
    ) -> Tensor:
        """The variational bound of a step, in bits, elementwise over channels-last positions."""
        predicted = self._reverse_step(step, first, rest, x_t, clip=False)
        mean, log_variance = predicted.mean, predicted.log_variance
        true_mean = step.posterior_mean(x_start, x_t)
        kl = gaussian_kl(true_mean, step.posterior_log_variance, mean, log_variance)
        nll = discretised_nll(x_start, mean, log_variance)
        return torch.where(step.is_first.bool(), nll, kl) * BITS

    def reverse_step(self, predicted: Tensor, x_t: Tensor, t: Tensor) -> ReverseStep:
        """The distribution of ``x_{t-1}`` for a prediction ``[B, C_out, F, h, w]`` at t ``[B]``."""
        first, rest = predicted.tensor_split([x_t.shape[1]], dim=1)
        step = self.steps.at(t, x_t)
        return self._reverse_step(step, first, rest, x_t, clip=self.clip_denoised)

    def _reverse_step(
        self, step: Steps, first: Tensor, rest: Tensor, x_t: Tensor, *, clip: bool
    ) -> ReverseStep:
        x_start = first
        if not self.predict_xstart:
            x_start = step.sqrt_recip_alpha_bar * x_t - step.sqrt_recipm1_alpha_bar * first
        if clip:
            x_start = x_start.clamp(-1, 1)

        if self.learn_sigma:
            weight = (rest + 1) / 2
            log_variance = weight * step.log_beta + (1 - weight) * step.posterior_log_variance
        else:
            fixed = step.posterior_log_variance if self.sigma_small else step.log_beta_clipped
            log_variance = fixed.expand_as(x_t)
        return ReverseStep(x_start, step.posterior_mean(x_start, x_t), log_variance)

    def ancestral_step(self, predicted: Tensor, x_t: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """A sample of ``x_{t-1}`` from ``noise`` of its shape; step 0 adds no noise."""
        reverse = self.reverse_step(predicted, x_t, t)
        adds_noise = 1 - self.steps.at(t, x_t).is_first
        return reverse.mean + adds_noise * torch.exp(0.5 * reverse.log_variance) * noise

    def ddim_step(
        self, predicted: Tensor, x_t: Tensor, t: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        """``x_{t-1}`` as in DDIM (Song et al., 2020); ``ddim_eta`` above 0 needs ``noise``."""
        step = self.steps.at(t, x_t)
        x_start = self.reverse_step(predicted, x_t, t).x_start

        # The noise in x_t that remains for this x_start.
        epsilon = (step.sqrt_recip_alpha_bar * x_t - x_start) / step.sqrt_recipm1_alpha_bar
        previous = step.alpha_bar_prev
        variance_ratio = ((1 - previous) / (1 - step.alpha_bar)).sqrt()
        sigma = variance_ratio * (1 - step.alpha_bar / previous).sqrt() * self.ddim_eta

        x = previous.sqrt() * x_start + (1 - previous - sigma.square()).sqrt() * epsilon
        return x if noise is None else x + (1 - step.is_first) * sigma * noise

    def guide(self, model: Callable[..., Tensor], **inputs: Any) -> Prediction:
        """The guided prediction, with the variance of the captioned half; see ``Guidance``."""
        return Guidance(model, lambda step: self.cfg_scale, channels=self.cfg_channel, **inputs)

    def noise_levels(self, geometry: Geometry) -> list[float]:
        return [t.item() / self.diffusion_steps for t in self.timestep_map.flip(0)]

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
        """Denoise ``z`` step by step; returns data of the shape of ``z``.

        Args:
            predict: the guided network with all its channels, called with ``network_time``.
            z: noise ``[B, c, F, h, w]``, with conditioning frames where ``frame_levels`` is below
                1.
            geometry: not used.
            frame_levels: ``[B, F]`` in [0, 1], the share of the steps in which a frame is denoised:
                1 generates it, 0 keeps it, values between edit it. As in Open-Sora a frame is
                noised at its first step, and is a conditioning frame for the network in that step.
                So kept frames go through step 0, which has the least noise.
            draw_noise: ``draw_noise(k)`` of the shape of z, the k-th draw of the loop: one per
                step, or none for "ddim" with ``ddim_eta`` 0. With ``frame_levels`` there is one
                more per step, before the other.
            on_step: called after each step; may return other latents.

        Raises:
            ValueError: without ``draw_noise`` where it is needed.
        """
        needs_noise = frame_levels is not None or self.sampler == "ancestral" or self.ddim_eta
        if draw_noise is None and needs_noise:
            raise ValueError(
                "got no draw_noise; expected noise for the steps of this sampler; pass it, or use "
                "DDIM"
            )
        draws = map(draw_noise, itertools.count()) if draw_noise is not None else iter(())

        count = len(self.timestep_map)
        first_step = None if frame_levels is None else (frame_levels * count).int()  # [B, F]
        for number, index in enumerate(reversed(range(count))):
            t = torch.full((len(z),), index, device=z.device)
            active, previous = None, z
            if first_step is not None:
                z = torch.where(by_frame(first_step == index), self.add_noise(z, next(draws), t), z)
                active = first_step > index

            predicted = predict(z, self.network_time(t), active)
            if self.sampler == "ancestral":
                z = self.ancestral_step(predicted, z, t, next(draws))
            else:
                z = self.ddim_step(predicted, z, t, next(draws) if self.ddim_eta else None)

            if first_step is not None:
                z = torch.where(by_frame(first_step >= index), z, previous)
            if on_step is not None:
                edited = on_step(number, t, z)
                z = z if edited is None else edited
        return z
