"""Guidance of Open-Sora 1.3: by text and by conditioning frames, each with its own scale.

With conditioning frames a step predicts three times: with caption and frames, with the frames
alone and with neither. The result is ``neither + s_image (frames - neither) + s_text (both -
frames)``, as in InstructPix2Pix (Brooks et al., 2023).

Legend: B samples, c latent channels, F latent frames, h x w latent size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .process import per_sample

# Of the flaw fix: the share that is scaled to the deviation of the conditional prediction.
RESCALED = 0.7


@dataclass(frozen=True)
class ConditioningFrames:
    """Conditioning frames of a batch of clips.

    Attributes:
        latents: ``[B, c, F, h, w]``; only the frames in ``index`` count.
        index: numbers of the conditioning frames, the same in all clips.
    """

    latents: Tensor
    index: Sequence[int]

    @property
    def mask(self) -> Tensor:
        """1 in conditioning frames, else 0: ``[B, c, F, h, w]``."""
        mask = torch.zeros_like(self.latents)
        mask[:, :, list(self.index)] = 1
        return mask

    def inputs(self) -> dict[str, Any]:
        """Inputs of the model: ``cond``, ``cond_mask`` and ``mask_index``."""
        # The other frames may be NaN, where a rank has no need of them.
        mask = self.mask
        cond = torch.where(mask.bool(), self.latents, 0.0)
        return dict(cond=cond, cond_mask=mask, mask_index=sorted(set(self.index)))

    def guided_inputs(self) -> dict[str, Any]:
        """``inputs`` for the batch of three of ``image_guided``."""
        own = self.inputs()
        cond, mask = own["cond"], own["cond_mask"]
        return own | dict(
            cond=torch.cat([cond, cond, torch.zeros_like(cond)]), cond_mask=torch.cat([mask] * 3)
        )

    def replaced(self, z: Tensor, noised: Tensor) -> Tensor:
        """z with the frames of ``noised`` in place of the conditioning frames."""
        z, frames = z.clone(), list(self.index)
        z[:, :, frames] = noised[:, :, frames]
        return z


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Guidance scales of each step.

    Attributes:
        text, image: the full scales.
        text_oscillates, image_oscillates: guide by 1 in every second step, from ``force_num`` on.
        image_start: weight of the first frame, from which that of the image rises linearly to the
            last frame; its upper end falls to ``image_start`` over the steps. None is one weight
            for all frames and steps.
        num_steps: number of steps.
    """

    text: float
    image: float
    text_oscillates: bool = False
    image_oscillates: bool = False
    force_num: int = 10
    image_start: float | None = None
    num_steps: int = 1

    def text_at(self, step: int) -> float:
        """The scale of the caption."""
        return self._oscillating(self.text, step) if self.text_oscillates else self.text

    def image_at(self, step: int, num_frames: int) -> list[float]:
        """The scale of the conditioning frames, for each frame."""
        upper = self._oscillating(self.image, step) if self.image_oscillates else self.image
        start = self.image_start
        if start is None or upper <= start:
            return [upper] * num_frames

        upper -= (upper - start) * step / max(1, self.num_steps - 1)
        return [start + (upper - start) * i / max(1, num_frames - 1) for i in range(num_frames)]

    def _oscillating(self, scale: float, step: int) -> float:
        return scale if step < self.force_num or step % 2 == 0 else 1.0


class Guidance:
    """A guided prediction that counts its calls: one object for the steps of one sampling.

    Args:
        model: called as ``model(x, t, **inputs)`` on the doubled batch, conditional half first, or
            with ``by_image`` on the batch of three: caption and frames, frames, neither.
        scales: of each step.
        by_image: whether frames guide as well.
        flaw_fix: whether guidance by text keeps the deviation of the conditional prediction
            (``fix_flaws``).
        inputs: further model inputs for that batch.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        scales: Scales,
        *,
        by_image: bool,
        flaw_fix: bool = False,
        **inputs: Any,
    ) -> None:
        self.model, self.scales, self.inputs = model, scales, inputs
        self.by_image, self.flaw_fix = by_image, flaw_fix
        self.step = 0

    def __call__(self, x: Tensor, t: Tensor, x_mask: Tensor | None) -> Tensor:
        """The guided prediction ``[B, c, F, h, w]``."""
        copies = 3 if self.by_image else 2
        mask = None if x_mask is None else torch.cat([x_mask] * copies)
        out = self.model(
            torch.cat([x] * copies), torch.cat([t] * copies), x_mask=mask, **self.inputs
        )
        predictions = out[:, : x.shape[1]].to(x.dtype).chunk(copies)

        combine = self._by_image if self.by_image else self._by_text
        guided = combine(*predictions)
        self.step += 1
        return guided

    def _by_text(self, both: Tensor, neither: Tensor) -> Tensor:
        guided = neither + self.scales.text_at(self.step) * (both - neither)
        return fix_flaws(guided, both) if self.flaw_fix else guided

    def _by_image(self, both: Tensor, frames: Tensor, neither: Tensor) -> Tensor:
        scales = self.scales.image_at(self.step, both.shape[2])
        image_scale = both.new_tensor(scales)[:, None, None]  # [F, 1, 1]
        text = self.scales.text_at(self.step) * (both - frames)
        return neither + image_scale * (frames - neither) + text


def fix_flaws(guided: Tensor, conditional: Tensor) -> Tensor:
    """Guided predictions, scaled towards the deviation of the conditional ones (Lin et al., 2024).

    Both ``[B, ...]``; each sample has its own deviation.
    """
    ratio = conditional.flatten(1).std(1) / guided.flatten(1).std(1)  # [B]
    return guided * per_sample(RESCALED * ratio + 1 - RESCALED, guided)
