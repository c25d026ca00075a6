"""Rectified flow (Liu et al., 2022; schedule and guidance as in Open-Sora 1.2).

Data and noise are joined by a straight line, ``x_t = (1 - t/N) x_0 + (t/N) noise`` for t in 0
(data) .. N (noise), and the network learns its velocity ``x_0 - noise``. Sampling follows the
velocity from t = N to 0 in Euler steps.

Legend: B samples, c channels, F latent frames, n sampling steps, N ``num_timesteps``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from .cached_steps import SamplingOptions
from .conditioning_frames import check_drop_condition
from .guidance import ConditioningFrames, Guidance
from .loss import frame_weights, velocity_loss
from .process import (
    Factor,
    Geometry,
    GuidanceScale,
    Noised,
    NumSteps,
    OnStep,
    Positive,
    Prediction,
    Share,
    by_frame,
    per_sample,
)


@dataclass(frozen=True, kw_only=True)
class RectifiedFlow(SamplingOptions):
    """Timesteps, forward process, loss and sampler.

    ``use_timestep_transform`` shifts timesteps towards noise for larger and longer videos,
    ``transform_scale`` times as far. ``legacy_frame_count`` estimates latent frames as Open-Sora
    1.2 does: 5 for each whole 17 frames of a video. This is right for its own VAE, and 0 below 17
    frames. With "v1.3" it is a quarter of the frames, 0 below 5, and only videos are scaled.

    With ``sample_method`` "logit-normal" the logits of training timesteps are normal with mean
    ``loc`` and standard deviation ``scale`` (Esser et al., 2024). This has more timesteps in the
    middle of the path than "uniform".

    The others are of Open-Sora 1.3 (``guidance.py``). ``image_cfg_scale`` guides by
    conditioning frames, None as far as ``cfg_scale`` by text. ``use_oscillation_guidance``
    alternates scales with 1 from step ``force_num`` on, for text or image alone as its variants are
    set. ``scale_image_weight`` raises the image's weight over frames from ``initial_image_scale``,
    ``use_flaw_fix`` keeps deviations. With ``use_sdedit`` conditioning frames are noised data in
    each step (Meng et al., 2022) and not generated. In training, ``x_cond_weight`` is the weight of
    conditioning frames in the loss, and ``drop_condition`` how often caption and frames are dropped
    (``conditioning_frames.py``).

    Raises:
        ValueError: for unknown names in ``drop_condition``, and as of ``SamplingOptions``. Other
            values are checked where they come from a config, by their types.
    """

    num_timesteps: Positive = 1000
    num_sampling_steps: NumSteps = 30
    cfg_scale: GuidanceScale = 7.0
    use_discrete_timesteps: bool = False
    use_timestep_transform: bool = False
    transform_scale: Factor = 1.0
    legacy_frame_count: bool | Literal["v1.3"] = False
    sample_method: Literal["uniform", "logit-normal"] = "uniform"
    loc: float = 0.0
    scale: Factor = 1.0
    image_cfg_scale: GuidanceScale | None = None
    use_oscillation_guidance: bool = False
    use_oscillation_guidance_for_text: bool | None = None
    use_oscillation_guidance_for_image: bool | None = None
    force_num: int = 10
    scale_image_weight: bool = False
    initial_image_scale: float = 1.0
    use_flaw_fix: bool = False
    use_sdedit: bool = False
    x_cond_weight: Share = 1.0
    drop_condition: dict[str, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drop_condition(self.drop_condition)

    def check_channels(self, in_channels: int, out_channels: int) -> None:
        """Accept any model: output channels beyond the latent's are ignored."""

    def geometry(
        self, height: Tensor, width: Tensor, *, latent_frames: int, video_frames: int
    ) -> Geometry:
        """Pixel size ``[B]`` and the frames that this transform counts."""
        frames = video_frames if self.legacy_frame_count else latent_frames
        return Geometry(height, width, torch.full_like(height, frames))

    def timesteps_from(self, uniform: Tensor, geometry: Geometry | None = None) -> Tensor:
        """Training timesteps ``[B]`` in [0, N] from uniform numbers in [0, 1) ``[B]``."""
        if self.sample_method == "logit-normal":
            uniform = torch.sigmoid(self.loc + self.scale * torch.special.ndtri(uniform))
        t = uniform * self.num_timesteps
        if self.use_discrete_timesteps:
            # In float32, the product may be rounded up to N.
            t = t.floor().clamp(max=self.num_timesteps - 1)
        return self._transform(t, geometry)

    def network_time(self, t: Tensor) -> Tensor:
        """The network's input is t itself."""
        return t

    def add_noise(self, x_start: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """``x_t`` for ``x_start`` and ``noise`` ``[B, c, F, h, w]`` at t ``[B]``."""
        wide = torch.promote_types(x_start.dtype, torch.float32)
        signal = per_sample(1 - t.to(wide) / self.num_timesteps, x_start)
        return (signal * x_start + (1 - signal) * noise).to(x_start.dtype)

    def noisy_input(
        self, x_start: Tensor, noise: Tensor, t: Tensor, x_mask: Tensor | None = None
    ) -> Tensor:
        """The network's input ``x_t``; conditioning frames (``x_mask`` False) are ``x_start``."""
        x_t = self.add_noise(x_start, noise, t)
        return x_t if x_mask is None else torch.where(by_frame(x_mask), x_t, x_start)

    @staticmethod
    def target(x_start: Tensor, noise: Tensor) -> Tensor:
        """The velocity that the network learns."""
        return x_start - noise

    def losses(self, prediction: Tensor | Any, noised: Noised) -> Tensor:
        """Squared error of the velocity, ``[B]``; see ``velocity_loss``."""
        weights = None
        if noised.conditioning_frames and self.x_cond_weight != 1:
            weights = frame_weights(
                noised.target.shape[2], noised.conditioning_frames, self.x_cond_weight
            ).to(noised.target)
        return velocity_loss(prediction, noised.target, noised.x_mask, noised.video_mask, weights)

    def guide(self, model: Callable[..., Tensor], **inputs: Any) -> Prediction:
        """The guided velocity of a model, for one call of ``sample``; see ``Guidance``.

        With ``mask_index`` among the inputs, frames guide as well, and the inputs are for the batch
        of three.
        """
        return Guidance(
            model,
            self.text_scale,
            self.image_scales if inputs.get("mask_index") else None,
            flaw_fix=self.use_flaw_fix,
            **inputs,
        )

    def text_scale(self, step: int) -> float:
        """The scale of the caption in a step."""
        return self._oscillating(self.cfg_scale, step, self.use_oscillation_guidance_for_text)

    def image_scales(self, step: int, num_frames: int) -> list[float]:
        """The scale of the conditioning frames in a step, for each frame.

        With ``scale_image_weight`` it rises linearly from the first frame to the last, and its
        upper end falls to ``initial_image_scale`` over the steps.
        """
        upper = self.cfg_scale if self.image_cfg_scale is None else self.image_cfg_scale
        upper = self._oscillating(upper, step, self.use_oscillation_guidance_for_image)
        start = self.initial_image_scale
        if not self.scale_image_weight or upper <= start:
            return [upper] * num_frames

        upper -= (upper - start) * step / max(1, self.num_sampling_steps - 1)
        return [start + (upper - start) * i / max(1, num_frames - 1) for i in range(num_frames)]

    def _oscillating(self, scale: float, step: int, variant: bool | None) -> float:
        oscillates = self.use_oscillation_guidance if variant is None else variant
        return 1.0 if oscillates and step >= self.force_num and step % 2 == 1 else scale

    def sampling_timesteps(
        self, num_samples: int, geometry: Geometry | None = None, **options: Any
    ) -> list[Tensor]:
        """The n timesteps of sampling, each ``[B]``, from N down.

        Args:
            options: dtype and device of the latents.
        """
        n = self.num_sampling_steps
        steps = [(1 - i / n) * self.num_timesteps for i in range(n)]
        if self.use_discrete_timesteps:
            options = {**options, "dtype": torch.int64}
            steps = [round(t) for t in steps]

        return [self._transform(torch.full((num_samples,), t, **options), geometry) for t in steps]

    def noise_levels(self, geometry: Geometry) -> list[float]:
        timesteps = self.sampling_timesteps(1, geometry, dtype=torch.float64, device="cpu")
        return [t.item() / self.num_timesteps for t in timesteps]

    def sample(
        self,
        predict: Prediction,
        z: Tensor,
        *,
        geometry: Geometry | None = None,
        frame_levels: Tensor | None = None,
        conditioning_frames: ConditioningFrames | None = None,
        draw_noise: Callable[[int], Tensor] | None = None,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Follow the velocity from noise ``z`` to data in n Euler steps.

        Args:
            predict: the guided network; output channels beyond z's are ignored.
            z: noise ``[B, c, F, h, w]``, with conditioning frames where ``frame_levels`` is below
                1.
            frame_levels: ``[B, F]`` in [0, 1], the share of the path from data to noise that a
                frame is moved along: 1 generates it, 0 keeps it, values between edit it.
            conditioning_frames: those that are inputs of ``predict``; ``use_sdedit`` replaces them
                by noised data in each step.
            draw_noise: ``draw_noise(step)`` of the shape of z, needed with ``frame_levels`` and for
                ``use_sdedit``.
            on_step: called after each step; may return other latents.

        Returns:
            Data of the shape of ``z``.

        Raises:
            ValueError: for ``frame_levels`` or ``use_sdedit`` without ``draw_noise``.
        """
        # Those that are noised data in each step.
        has_frames = conditioning_frames is not None and bool(conditioning_frames.index)
        edited = conditioning_frames if self.use_sdedit and has_frames else None
        if draw_noise is None and not (frame_levels is None and edited is None):
            what = "use_sdedit" if frame_levels is None else "frame_levels"
            raise ValueError(
                f"got {what} without draw_noise; expected noise for each step; pass it"
            )

        # Timesteps rounded to bf16 would be other timesteps.
        wide = torch.promote_types(z.dtype, torch.float32)
        timesteps = self.sampling_timesteps(len(z), geometry, dtype=wide, device=z.device)
        # Frames that begin as noise do not have to be noised.
        was_active = None if frame_levels is None else frame_levels == 1

        for i, (t, next_t) in enumerate(pairwise([*timesteps, torch.zeros_like(timesteps[0])])):
            if edited is not None:
                assert draw_noise is not None
                z = edited.replaced(z, self.add_noise(edited.latents, draw_noise(i), t))
            active, previous = None, z
            if frame_levels is not None:
                assert was_active is not None and draw_noise is not None
                active = frame_levels * self.num_timesteps >= t[:, None]  # [B, F]
                noised = self.add_noise(z, draw_noise(i), t)
                z = torch.where(by_frame(active & ~was_active), noised, z)
                was_active = active

            v = predict(z, t, active)[:, : z.shape[1]]
            dt = (t - next_t) / self.num_timesteps  # [B]
            z = z + v * per_sample(dt.to(z.dtype), z)

            if active is not None:
                z = torch.where(by_frame(active), z, previous)
            if on_step is not None:
                latents = on_step(i, t, z)
                z = z if latents is None else latents
        return z

    def _transform(self, t: Tensor, geometry: Geometry | None) -> Tensor:
        """Shift timesteps by the square root of pixels x latent frames against 512 x 512 x 1."""
        if not self.use_timestep_transform:
            return t

        if geometry is None:
            raise ValueError(
                "got no geometry; expected height, width and num_frames with "
                "use_timestep_transform; pass them or turn the transform off"
            )

        ratio_space = (geometry.height * geometry.width / 512**2).sqrt()
        frames = geometry.num_frames
        scale: float | Tensor = self.transform_scale
        if self.legacy_frame_count:
            # The first sample decides whether these are images.
            is_image = frames[:1] == 1
            is_1_3 = self.legacy_frame_count == "v1.3"
            estimated = (frames - 1) // 4 if is_1_3 else frames // 17 * 5
            frames = torch.where(is_image, torch.ones_like(frames), estimated)
            if is_1_3:
                scale = torch.where(is_image, 1.0, self.transform_scale)

        ratio = ratio_space * frames.sqrt() * scale
        t = t / self.num_timesteps
        return ratio * t / (1 + (ratio - 1) * t) * self.num_timesteps
