"""Improved denoising diffusion (Nichol & Dhariwal, 2021; Ho et al., 2020), as Open-Sora 1.0 and 1.1
use it.

The network predicts the noise in ``x_t = signal_t x_0 + noise_t noise`` and, in a second set of
channels, where the variance of the step back lies between its smallest and largest value. Timesteps
t number the N steps that respacing leaves, 0 (data) to N - 1 (noise); the network is told which of
the ``diffusion_steps`` each of them is.

Legend: B samples, c latent channels, F latent frames, h x w latent size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from .gaussian import Steps, discretised_nll, gaussian_kl, named_betas, respaced_steps
from .loss import Positions
from .process import Geometry, Noised, Prediction, by_frame, guided

DTYPES = {"float64": torch.float64, "float32": torch.float32}
BITS = 1 / math.log(2)  # per nat


@dataclass(frozen=True)
class StepBack:
    """What a prediction says about the step from ``x_t`` to ``x_{t-1}``, each shaped like ``x_t``."""

    x_start: Tensor
    mean: Tensor
    log_variance: Tensor


@dataclass(frozen=True, kw_only=True)
class IDDPM:
    """Timesteps, forward process, losses and samplers; options are named as in Open-Sora.

    Args:
        num_sampling_steps: so many steps, evenly spaced, the same as ``timestep_respacing="n"``; 0
            leaves it to that. Once built it is the number of steps in either case. Training, too,
            is on these steps only: leave both away to train on all.
        timestep_respacing: "100", "10,15,20" or "ddim20"; see ``respaced_steps``.
        noise_schedule: "linear", or "squaredcos_cap_v2", the cosine one.
        diffusion_steps: steps before respacing.
        learn_sigma: the network predicts the variance in a second set of channels. Without, the
            variance is beta, or with ``sigma_small`` that of the posterior.
        predict_xstart: the network predicts the data, not the noise.
        use_kl: the loss is the variational bound, times the number of steps. Otherwise it is the
            squared error, plus with ``learn_sigma`` the bound (in bits) as a function of the
            variance alone; ``rescale_learned_sigmas`` scales that by N / 1000.
        cfg_scale: guidance; 1 is the captioned prediction alone.
        cfg_channel: guide this many channels only; Open-Sora 1.0 guides 3 of 4. None guides all.
        sampler: "ancestral", or "ddim" (Song et al., 2020) with ``ddim_eta``: 0 draws no noise, 1
            as much as ancestral with ``sigma_small``.
        clip_denoised: clip predicted data to [-1, 1] while sampling; for pixels, not latents.
        table_dtype: what the tables are derived in. "float32" gives the numbers of Open-Sora 1.2,
            which are inexact in the last steps by up to 0.5 % of the loss; "float64" those of 1.0.

    Raises:
        ValueError: for values that do not exist or do not fit each other.
    """

    num_sampling_steps: int = 0
    timestep_respacing: str | None = None
    noise_schedule: str = "linear"
    diffusion_steps: int = 1000
    learn_sigma: bool = True
    sigma_small: bool = False
    predict_xstart: bool = False
    use_kl: bool = False
    rescale_learned_sigmas: bool = False
    cfg_scale: float = 4.0
    cfg_channel: int | None = None
    sampler: Literal["ancestral", "ddim"] = "ancestral"
    ddim_eta: float = 0.0
    clip_denoised: bool = False
    table_dtype: Literal["float64", "float32"] = "float64"

    def __post_init__(self) -> None:
        if self.num_sampling_steps < 0 or self.diffusion_steps < 1:
            raise ValueError(
                f"got num_sampling_steps {self.num_sampling_steps} and diffusion_steps "
                f"{self.diffusion_steps}; expected none negative, and at least one diffusion step; "
                "change them"
            )
        if not 0 <= self.ddim_eta <= 1:
            raise ValueError(
                f"got ddim_eta {self.ddim_eta}; expected 0 (no noise) to 1 (as much as ancestral "
                "with sigma_small); change it: more noise than a step holds has no root"
            )
        for name, known in (("sampler", ("ancestral", "ddim")), ("table_dtype", tuple(DTYPES))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"got {name} {getattr(self, name)!r}; expected one of {list(known)}; choose "
                    "one of these"
                )
        if self.cfg_channel is not None and self.cfg_channel < 1:
            raise ValueError(
                f"got cfg_channel {self.cfg_channel}; expected at least 1, or None; change it"
            )
        wanted, found = self.num_sampling_steps, len(self.timestep_map)
        if self.timestep_respacing and wanted not in (0, found):
            raise ValueError(
                f"got num_sampling_steps {wanted} and timestep_respacing "
                f"{self.timestep_respacing!r}, which makes {found} steps; expected one of the two, "
                "or the same number; remove num_sampling_steps"
            )
        self.steps  # noqa: B018  # so that a schedule that does not exist is refused here
        object.__setattr__(self, "num_sampling_steps", found)

    @cached_property
    def timestep_map(self) -> Tensor:
        """Which of the ``diffusion_steps`` each step is, int64 ``[N]``."""
        spacing = self.timestep_respacing or (
            str(self.num_sampling_steps) if self.num_sampling_steps else ""
        )
        return torch.tensor(respaced_steps(self.diffusion_steps, spacing))

    @cached_property
    def steps(self) -> Steps:
        """The tables, each ``[N]``."""
        alpha_bar = (1 - named_betas(self.noise_schedule, self.diffusion_steps)).cumprod(0)
        return Steps.of(alpha_bar[self.timestep_map], DTYPES[self.table_dtype])

    def check_channels(self, in_channels: int, out_channels: int) -> None:
        """Raise ValueError if a model does not predict the variance that ``learn_sigma`` asks for."""
        if self.learn_sigma and out_channels != 2 * in_channels:
            raise ValueError(
                f"got a scheduler with learn_sigma and a model with {out_channels} output channels "
                f"for {in_channels} of the latent; expected {2 * in_channels}; set "
                "model.pred_sigma=True, or scheduler.learn_sigma=False"
            )

    def geometry(
        self, height: Tensor, width: Tensor, *, latent_frames: int, video_frames: int
    ) -> Geometry:
        """Size of the samples; this process does not depend on it."""
        return Geometry(height, width, torch.full_like(height, latent_frames))

    def timesteps_from(self, uniform: Tensor, geometry: Geometry | None = None) -> Tensor:
        """Training timesteps, int64 ``[B]``, from uniform numbers in [0, 1) ``[B]``."""
        count = len(self.timestep_map)
        return (
            (uniform * count).long().clamp(max=count - 1)
        )  # a float32 just below 1 may have been rounded up to it

    def network_time(self, t: Tensor) -> Tensor:
        """Which of the ``diffusion_steps`` the network is told at t, int64 ``[B]``."""
        return self.timestep_map.to(t.device)[t]

    def add_noise(self, x_start: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """``x_t`` for ``x_start`` and ``noise`` ``[B, c, F, h, w]`` at t int64 ``[B]``."""
        step = self.steps.at(t, x_start)
        return step.signal * x_start + step.noise * noise

    def noisy_input(
        self, x_start: Tensor, noise: Tensor, t: Tensor, x_mask: Tensor | None = None
    ) -> Tensor:
        """What the network sees: ``x_t``; given frames (``x_mask`` False) are noised by the first
        step alone.
        """
        x_t = self.add_noise(x_start, noise, t)
        if x_mask is None:
            return x_t
        return torch.where(
            by_frame(x_mask), x_t, self.add_noise(x_start, noise, torch.zeros_like(t))
        )

    def target(self, x_start: Tensor, noise: Tensor) -> Tensor:
        """What the network learns to predict in its first channels."""
        return x_start if self.predict_xstart else noise

    def losses(self, prediction: Tensor | Any, noised: Noised) -> Tensor:
        """Each sample's loss ``[B]``, the sum of its ``loss_terms``."""
        return torch.stack(list(self.loss_terms(prediction, noised).values())).sum(0)

    def loss_terms(self, prediction: Tensor | Any, noised: Noised) -> dict[str, Tensor]:
        """ "mse" and "vb", whichever the options ask for, each ``[B]``.

        Args:
            prediction: ``[B, C_out, F, h, w]``, or the ``Shard`` of it that this rank holds; then
                the terms are parts of the sample's, which sum to them over the ranks.
        """
        masks = dict(x_mask=noised.x_mask, video_mask=noised.video_mask)
        here = Positions.of(prediction, noised.target, noised.x_start, noised.x_t, **masks)
        target, x_start, x_t = here.wholes
        first, rest = (
            here.predicted[..., : target.shape[-1]],
            here.predicted[..., target.shape[-1] :],
        )
        step = self.steps.at(noised.t[here.sample], x_t)
        terms = {}
        if not self.use_kl:
            terms["mse"] = here.means((target - first).square())
        if self.use_kl or self.learn_sigma:
            mean_part = first if self.use_kl else first.detach()
            bound = here.means(self._bound(step, mean_part, rest, x_start, x_t))
            if self.use_kl:
                bound = bound * len(self.timestep_map)
            elif self.rescale_learned_sigmas:
                bound = bound * (len(self.timestep_map) / 1000)
            terms["vb"] = bound
        return terms

    def _bound(
        self, step: Steps, first: Tensor, rest: Tensor, x_start: Tensor, x_t: Tensor
    ) -> Tensor:
        """The step's term of the variational bound, in bits, elementwise over channels-last
        positions.
        """
        ours = self._step_back(step, first, rest, x_t, clip=False)
        true_mean = step.mean_of_start * x_start + step.mean_of_x * x_t
        kl = gaussian_kl(true_mean, step.log_smallest, ours.mean, ours.log_variance)
        nll = discretised_nll(x_start, ours.mean, ours.log_variance)
        return torch.where(step.is_first.bool(), nll, kl) * BITS

    def step_back(
        self, predicted: Tensor, x_t: Tensor, t: Tensor, *, clip: bool = False
    ) -> StepBack:
        """What a prediction ``[B, C_out, F, h, w]`` says about the step back from ``x_t`` at t
        int64 ``[B]``.
        """
        channels = x_t.shape[1]
        return self._step_back(
            self.steps.at(t, x_t), predicted[:, :channels], predicted[:, channels:], x_t, clip=clip
        )

    def _step_back(
        self, step: Steps, first: Tensor, rest: Tensor, x_t: Tensor, *, clip: bool
    ) -> StepBack:
        x_start = first if self.predict_xstart else step.per_x * x_t - step.per_noise * first
        if clip:
            x_start = x_start.clamp(-1, 1)
        if self.learn_sigma:
            share = (rest + 1) / 2
            log_variance = share * step.log_largest + (1 - share) * step.log_smallest
        else:
            log_variance = (step.log_smallest if self.sigma_small else step.log_fixed).expand_as(
                x_t
            )
        return StepBack(x_start, step.mean_of_start * x_start + step.mean_of_x * x_t, log_variance)

    def ancestral_step(self, predicted: Tensor, x_t: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """A draw of ``x_{t-1}``, with ``noise`` shaped like it; the first step adds none."""
        back = self.step_back(predicted, x_t, t, clip=self.clip_denoised)
        return (
            back.mean
            + (1 - self.steps.at(t, x_t).is_first) * torch.exp(0.5 * back.log_variance) * noise
        )

    def ddim_step(
        self, predicted: Tensor, x_t: Tensor, t: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        """``x_{t-1}`` after Song et al., 2020; ``noise`` shaped like it is needed for ``ddim_eta``
        above 0.
        """
        step = self.steps.at(t, x_t)
        x_start = self.step_back(predicted, x_t, t, clip=self.clip_denoised).x_start
        direction = (
            step.per_x * x_t - x_start
        ) / step.per_noise  # the noise that x_start leaves in x_t
        before = step.alpha_bar_before
        spread = (
            ((1 - before) / (1 - step.alpha_bar)).sqrt()
            * (1 - step.alpha_bar / before).sqrt()
            * self.ddim_eta
        )
        x = before.sqrt() * x_start + (1 - before - spread.square()).sqrt() * direction
        return x if noise is None else x + (1 - step.is_first) * spread * noise

    def guide(
        self, model: Callable[..., Tensor], *, drop_caption: Tensor | None = None, **inputs: Any
    ) -> Prediction:
        """The guided prediction of a model, with the variance of its captioned half; see
        ``guided``.
        """
        return guided(
            model, self.cfg_scale, drop_caption=drop_caption, channels=self.cfg_channel, **inputs
        )

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
        """Go back from noise ``z`` to data step by step; returns data, shaped like ``z``.

        Args:
            predict: the guided network, with all its channels; it is told ``network_time``.
            z: noise ``[B, c, F, h, w]``, holding given frames where ``frame_levels`` is below 1.
            geometry: not used.
            frame_levels: ``[B, F]`` in [0, 1], the share of the steps that a frame still has to go:
                1 generates it, 0 keeps it, values between edit it. As in Open-Sora a frame is
                noised at the step where it begins, of which the network is told that it is given;
                kept frames so go through step 0, where the noise is least.
            draw_noise: ``draw_noise(k)`` shaped like z, the k-th draw of the loop: one a step, or
                none for "ddim" with ``ddim_eta`` 0; with ``frame_levels`` one more a step, before
                the other.
            on_step: called after each step.

        Raises:
            ValueError: without ``draw_noise`` where it is needed.
        """
        if draw_noise is None and (
            frame_levels is not None or self.sampler == "ancestral" or self.ddim_eta
        ):
            raise ValueError(
                "got no draw_noise; expected noise for the steps of this sampler; pass it, or use "
                "DDIM"
            )
        count, draws = len(self.timestep_map), 0

        def draw() -> Tensor:
            nonlocal draws
            assert draw_noise is not None
            draws += 1
            return draw_noise(draws - 1)

        starts_at = None if frame_levels is None else (frame_levels * count).int()  # [B, F]
        for index in reversed(range(count)):
            t = torch.full((len(z),), index, device=z.device)
            active, given = None, z
            if starts_at is not None:
                z = torch.where(by_frame(starts_at == index), self.add_noise(z, draw(), t), z)
                active = starts_at > index
            predicted = predict(z, self.network_time(t), active)
            if self.sampler == "ancestral":
                moved = self.ancestral_step(predicted, z, t, draw())
            else:
                moved = self.ddim_step(predicted, z, t, draw() if self.ddim_eta else None)
            z = (
                moved
                if starts_at is None
                else torch.where(by_frame(starts_at >= index), moved, given)
            )
            if on_step is not None:
                on_step()
        return z
