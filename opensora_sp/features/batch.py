"""One micro-batch of a training step: noised latents, and the other arguments of model and loss.

Legend: B clips, c latent channels, f x h x w latent size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.tensors import to_device
from opensora_sp.config import TrainConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.diffusion import ConditioningFrames, DiffusionProcess, Noised
from opensora_sp.diffusion.size_conditions import size_conditions

from .draws import Draws
from .sharded import Features


@dataclass(frozen=True)
class Batch:
    """Arguments of the model and the loss; ``inputs`` are keyword arguments beside ``x``.

    Under sequence parallelism, latents that this rank neither embeds nor compares are NaN, see
    ``Features``.
    """

    noised: Noised
    inputs: dict[str, Any]
    ids: Tensor  # int64 [B], of the clips
    text_lengths: list[int]  # tokens of each caption, also of captions that this rank does not need
    extra: tuple[str, ...] = ()  # inputs that this rank has for its own clips only

    @property
    def x_t(self) -> Tensor:
        """The model's input, ``[B, c, f, h, w]``."""
        return self.noised.x_t

    @property
    def target(self) -> Tensor:
        """What the model learns to predict, ``[B, c, f, h, w]``."""
        return self.noised.target

    @property
    def of_group(self) -> dict[str, Any]:
        """The tensors that are equal on all ranks of a group: not latents and captions."""
        own = ("y", "mask", "cond", "mask_index", *self.extra)
        shared = {name: one for name, one in self.inputs.items() if name not in own}
        return {"ids": self.ids} | shared


class BatchMaker:
    """Adds noise to latents, and collects the model's arguments."""

    def __init__(self, cfg: TrainConfig, device: torch.device) -> None:
        self.device = device
        self.flow: DiffusionProcess = build_component(cfg.scheduler, SCHEDULERS)
        self.sample_inputs = cfg.model_spec.model_class.sample_inputs
        self.channels = cfg.model_spec.config.in_channels

    @torch.no_grad()
    def make(self, features: Features, draws: Draws, *, timestep: int = 0) -> Batch:
        """The batch of some clips at one of the timesteps that were drawn for each."""
        # Of degraded clips, the true latents follow.
        latents, *true = features.latents.split(self.channels, dim=1)
        geometry, numbers = size_conditions(
            self.flow,
            self.sample_inputs,
            features.shape,
            features.fps,
            latent_frames=latents.shape[2],
        )

        draws = to_device(draws, self.device)
        t = self.flow.timesteps_from(draws.timesteps[timestep], geometry)
        # On the CPU, where tokens are counted and the model checks masks.
        drop_caption = None if draws.drop_caption is None else torch.tensor(draws.drop_caption)
        x_mask = None if draws.frame_mask is None else torch.tensor(draws.frame_mask)
        inputs = dict(
            timestep=self.flow.network_time(t),
            y=features.y,
            mask=features.mask,
            x_mask=x_mask,
            drop_caption=drop_caption,
            drop_path=draws.drop_path,
            **numbers,
            **frames_beside_the_input(latents, draws),
            **features.extra,
        )
        if x_mask is not None:
            x_mask = to_device(x_mask, self.device)
        index = () if draws.condition is None else draws.condition.index
        noised = Noised.of(self.flow, latents, draws.noise, t, x_mask, index, *true)
        return Batch(noised, inputs, draws.ids, features.text_lengths, tuple(features.extra))


def frames_beside_the_input(latents: Tensor, draws: Draws) -> dict[str, Any]:
    """What the model takes of conditioning frames that lie beside its input.

    Images and clips of the kind "none" give zeros, so the biases of both embedders are added as in
    Open-Sora 1.3. Nothing is passed in training without ``mask_types``.
    """
    condition = draws.condition
    if condition is None:
        return {}

    if draws.reference_noise is not None:
        latents = latents + condition.noise * draws.reference_noise
    inputs = ConditioningFrames(latents, condition.index).inputs()
    if condition.drops_frames:
        # Their places stay.
        inputs["cond"] = torch.zeros_like(latents)
    return inputs
