"""Guidance by text (Ho & Salimans, 2022), and by conditioning frames as in Open-Sora 1.3.

With conditioning frames a step predicts three times: with caption and frames, with the frames
alone and with neither. The result is ``neither + s_image (frames - neither) + s_text (both -
frames)``, as in InstructPix2Pix (Brooks et al., 2023).

Legend: B samples, c latent channels, F latent frames, h x w latent size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opensora_sp.models.conditions import Text

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
        """``inputs`` for the batch of three of ``Guidance``."""
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
            with ``image_scales`` on the batch of three: caption and frames, frames, neither.
        text_scale: of a step, counted from 0; 1 is the conditional prediction alone.
        image_scales: of a step and each of so many frames; None if only the text guides.
        channels: number of output channels that are guided, by default as many as of x. Further
            ones, such as a learned variance, are taken from the conditional part.
        guided: for each step, whether it is guided; others make the conditional prediction alone.
            None guides all.
        flaw_fix: guidance by text keeps the deviation of the conditional prediction
            (``fix_flaws``).
        inputs: further model inputs for that batch, such as ``drop_caption``.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        text_scale: Callable[[int], float],
        image_scales: Callable[[int, int], list[float]] | None = None,
        *,
        channels: int | None = None,
        flaw_fix: bool = False,
        guided: Sequence[bool] | None = None,
        **inputs: Any,
    ) -> None:
        self.model, self.inputs = model, inputs
        self.text_scale, self.image_scales = text_scale, image_scales
        self.channels, self.flaw_fix, self.guided = channels, flaw_fix, guided
        self.step = 0

    def __call__(self, x: Tensor, t: Tensor, x_mask: Tensor | None) -> Tensor:
        """The guided prediction ``[B, C_out, F, h, w]``."""
        if self.guided is not None and not self.guided[self.step]:
            self.step += 1
            inputs = _of_first_samples(self.inputs, len(x))
            return self.model(x, t, x_mask=x_mask, **inputs).to(x.dtype)

        copies = 2 if self.image_scales is None else 3
        mask = None if x_mask is None else torch.cat([x_mask] * copies)
        out = self.model(
            torch.cat([x] * copies), torch.cat([t] * copies), x_mask=mask, **self.inputs
        )
        # In the dtype of the latents: differences of bf16 predictions would lose digits.
        guided, further = out.to(x.dtype).tensor_split([self.channels or x.shape[1]], dim=1)
        combine = self._by_text if self.image_scales is None else self._by_image
        combined = combine(*guided.chunk(copies))
        self.step += 1
        return torch.cat([combined, further[: len(x)]], dim=1)

    def _by_text(self, both: Tensor, neither: Tensor) -> Tensor:
        guided = neither + self.text_scale(self.step) * (both - neither)
        return fix_flaws(guided, both) if self.flaw_fix else guided

    def _by_image(self, both: Tensor, frames: Tensor, neither: Tensor) -> Tensor:
        assert self.image_scales is not None
        scales = self.image_scales(self.step, both.shape[2])
        image_scale = both.new_tensor(scales)[:, None, None]  # [F, 1, 1]
        text = self.text_scale(self.step) * (both - frames)
        return neither + image_scale * (frames - neither) + text


def _of_first_samples(inputs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The model's inputs for the first ``count`` samples of its batch."""
    selected = dict(inputs)
    for name, argument in inputs.items():
        if isinstance(argument, Tensor):
            selected[name] = argument[:count]
        elif isinstance(argument, Text):
            selected[name] = argument.of_samples(range(count))
    return selected


def fix_flaws(guided: Tensor, conditional: Tensor) -> Tensor:
    """Guided predictions, scaled towards the deviation of the conditional ones (Lin et al., 2024).

    Both ``[B, ...]``; each sample has its own deviation.
    """
    ratio = conditional.flatten(1).std(1) / guided.flatten(1).std(1)  # [B]
    return guided * per_sample(RESCALED * ratio + 1 - RESCALED, guided)
