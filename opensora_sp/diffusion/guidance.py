"""Guidance by text (Ho & Salimans, 2022), and by conditioning frames as in Open-Sora 1.3.

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

from .process import DiffusionProcess, Prediction, per_sample

# Of the flaw fix: the share that is scaled to the deviation of the conditional prediction.
RESCALED = 0.7


def predictions_per_step(process: DiffusionProcess, *, by_frames: bool) -> int:
    """Predictions that a sampling step makes of each sample: by how much guidance enlarges a batch.

    Args:
        by_frames: whether conditioning frames guide (``guidance.py``). This takes three,
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
        channels: number of output channels that are guided, by default as many as of x. Further
            ones, such as a learned variance, are taken from the conditional half.
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
        inputs = self.inputs()
        cond, mask = inputs["cond"], inputs["cond_mask"]
        inputs["cond"] = torch.cat([cond, cond, torch.zeros_like(cond)])
        inputs["cond_mask"] = torch.cat([mask] * 3)
        return inputs

    def replaced(self, z: Tensor, noised: Tensor) -> Tensor:
        """z with the frames of ``noised`` in place of the conditioning frames."""
        z, frames = z.clone(), list(self.index)
        z[:, :, frames] = noised[:, :, frames]
        return z


class Guidance:
    """A guided prediction that counts its calls: one object for the steps of one sampling.

    Args:
        model: called as ``model(x, t, **inputs)`` on the doubled batch, conditional half first, or
            with ``by_image`` on the batch of three: caption and frames, frames, neither.
        text_scale: of a step, counted from 0.
        image_scales: of a step and each of so many frames.
        by_image: frames guide as well.
        flaw_fix: guidance by text keeps the deviation of the conditional prediction
            (``fix_flaws``).
        inputs: further model inputs for that batch.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        text_scale: Callable[[int], float],
        image_scales: Callable[[int, int], list[float]],
        *,
        by_image: bool,
        flaw_fix: bool = False,
        **inputs: Any,
    ) -> None:
        self.model, self.inputs = model, inputs
        self.text_scale, self.image_scales = text_scale, image_scales
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
        guided = neither + self.text_scale(self.step) * (both - neither)
        return fix_flaws(guided, both) if self.flaw_fix else guided

    def _by_image(self, both: Tensor, frames: Tensor, neither: Tensor) -> Tensor:
        scales = self.image_scales(self.step, both.shape[2])
        image_scale = both.new_tensor(scales)[:, None, None]  # [F, 1, 1]
        text = self.text_scale(self.step) * (both - frames)
        return neither + image_scale * (frames - neither) + text


def fix_flaws(guided: Tensor, conditional: Tensor) -> Tensor:
    """Guided predictions, scaled towards the deviation of the conditional ones (Lin et al., 2024).

    Both ``[B, ...]``; each sample has its own deviation.
    """
    ratio = conditional.flatten(1).std(1) / guided.flatten(1).std(1)  # [B]
    return guided * per_sample(RESCALED * ratio + 1 - RESCALED, guided)
