"""One micro-batch of a training step: its random draws, and the arguments of model and loss.

Draws are keyed by seed, purpose and clip, in training also by the micro-batch, and never by rank or
worker. So the loader's workers draw them ahead of the step, and they are the same wherever they are
drawn.

Legend: B clips, c latent channels, f x h x w latent size, K timesteps of each clip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.tensors import to_device
from opensora_sp.config import TrainConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.data.randomness import generator, normal, uniform
from opensora_sp.data.sampler import MicroBatch
from opensora_sp.diffusion.conditioning_frames import (
    DrawnCondition,
    draw_condition,
    draw_frame_mask,
)
from opensora_sp.diffusion.guidance import ConditioningFrames
from opensora_sp.diffusion.process import DiffusionProcess, Noised, size_conditions

from .sharded import Features

Key = tuple[int, ...]
"""The counters of a clip's draws; the last one is its id."""


@dataclass(frozen=True)
class Draws:
    """The random numbers of B clips. Tensors are copied to the device, tuples stay on the host."""

    ids: Tensor  # int64 [B], of the clips
    noise: Tensor  # float32 [B, c, f, h, w]
    timesteps: Tensor  # float32 [K, B], uniform in [0, 1); K is 1 in training
    frame_mask: tuple[tuple[bool, ...], ...] | None  # [B][f], False for conditioning frames
    drop_caption: tuple[bool, ...] | None  # [B]; the host counts tokens
    drop_path: Tensor | None  # bool [2 * depth, B], True for branches to drop
    condition: DrawnCondition | None = None  # of all clips
    reference_noise: Tensor | None = None  # float32 [B, c, f, h, w], if the condition is noisy


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """Draws of each clip.

    Attributes:
        channels: c.
        purpose: prefix of what keys the noise, the timesteps and the condition.
        bins: K, where each clip has a timestep in each part of [0, 1); None for one in all of it.
        mask_ratios: probabilities of frame masks; None for no masks.
        patch_frames: latent frames of a patch, within which a frame mask is equal.
        mask_types: weights of the kinds of conditioning frames; None for none.
        drop_condition: weights of dropping captions, conditioning frames, both or none.
        caption_rate: probability of dropping a caption.
        path_rates: probability of dropping each branch of the model, float64 ``[2 * depth]``.
    """

    seed: int
    channels: int
    purpose: str = ""
    bins: int | None = None
    mask_ratios: Mapping[str, float] | None = None
    mask_types: Mapping[str, float] | None = None
    drop_condition: Mapping[str, float] | None = None
    patch_frames: int = 1
    caption_rate: float = 0.0
    path_rates: Tensor | None = None

    @classmethod
    def of_training(cls, cfg: TrainConfig, model_config: Any, channels: int) -> DrawConfig:
        """Draws of training. Branches are dropped at rates that grow with the depth."""
        rates = None
        # In float64: rates are compared with float64 draws.
        if model_config.drop_path:
            depth = model_config.depth
            rates = torch.linspace(0, model_config.drop_path, depth, dtype=torch.float64)
            rates = rates.repeat_interleave(2)
        return cls(
            seed=cfg.seed,
            channels=channels,
            mask_ratios=cfg.mask_ratios,
            mask_types=cfg.mask_types,
            drop_condition=cfg.scheduler.get("drop_condition"),
            patch_frames=model_config.patch_size[0],
            caption_rate=model_config.class_dropout_prob,
            path_rates=rates,
        )

    def draw_micro_batch(self, micro_batch: MicroBatch, latent_size: tuple[int, int, int]) -> Draws:
        """The draws of a micro-batch; of one clip for an idle round."""
        keys = [(micro_batch.number, sample) for sample in micro_batch.ids]
        return self.draw(keys or [(0, 0)], latent_size)

    def draw(self, keys: Sequence[Key], latent_size: tuple[int, int, int]) -> Draws:
        """The draws of clips with these keys, whose latents have this size (f, h, w)."""
        size, condition = (self.channels, *latent_size), self._condition(keys, latent_size[0])
        drop_caption, reference_noise = self._drop_caption(keys), None
        if condition is not None and condition.drops_text:
            drop_caption = (True,) * len(keys)
        if condition is not None and condition.noise:
            reference_noise = self._noise(keys, size, "reference_noise")

        return Draws(
            ids=torch.tensor([key[-1] for key in keys]),
            noise=self._noise(keys, size, "noise"),
            timesteps=self._timesteps(keys),
            frame_mask=self._frame_mask(keys, latent_size[0]),
            drop_caption=drop_caption,
            drop_path=self._drop_path(keys),
            condition=condition,
            reference_noise=reference_noise,
        )

    def _noise(self, keys: Sequence[Key], size: tuple[int, ...], purpose: str) -> Tensor:
        purpose = f"{self.purpose}{purpose}"
        return torch.stack([normal(size, self.seed, purpose, *key) for key in keys])

    def _condition(self, keys: Sequence[Key], num_frames: int) -> DrawnCondition | None:
        """One for all clips: the model takes the same conditioning frames of each."""
        if self.mask_types is None:
            return None
        draws = generator(self.seed, f"{self.purpose}condition", *keys[0])
        return draw_condition(self.mask_types, self.drop_condition, num_frames, draws)

    def _timesteps(self, keys: Sequence[Key]) -> Tensor:
        purpose = f"{self.purpose}timestep"
        if self.bins is None:
            return torch.tensor([[uniform(self.seed, purpose, *key) for key in keys]])

        rows = []
        for k in range(self.bins):
            drawn = [uniform(self.seed, purpose, *key, k) for key in keys]
            rows.append([(k + number) / self.bins for number in drawn])
        return torch.tensor(rows)

    def _frame_mask(
        self, keys: Sequence[Key], num_frames: int
    ) -> tuple[tuple[bool, ...], ...] | None:
        if self.mask_ratios is None:
            return None
        # Whole patches are conditioning frames, since a token has one timestep.
        patches = -(-num_frames // self.patch_frames)
        masks = []
        for key in keys:
            draws = generator(self.seed, "frame_mask", *key)
            mask = draw_frame_mask(self.mask_ratios, patches, draws)
            mask = mask.repeat_interleave(self.patch_frames)[:num_frames]
            masks.append(tuple(mask.tolist()))
        return tuple(masks)

    def _drop_caption(self, keys: Sequence[Key]) -> tuple[bool, ...] | None:
        if not self.caption_rate:
            return None
        drawn = [uniform(self.seed, "drop_caption", *key) for key in keys]
        return tuple(number < self.caption_rate for number in drawn)

    def _drop_path(self, keys: Sequence[Key]) -> Tensor | None:
        if self.path_rates is None:
            return None
        dropped = []
        for key in keys:
            drawn = generator(self.seed, "drop_path", *key).random(len(self.path_rates))
            dropped.append(torch.from_numpy(drawn) < self.path_rates)
        return torch.stack(dropped, dim=1)


@dataclass(frozen=True)
class Batch:
    """Arguments of the model and the loss; ``inputs`` are keyword arguments other than ``x``.

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
    def of_group(self) -> dict[str, Any]:
        """The tensors that are equal on all ranks of a group: not latents and captions."""
        by_rank = ("y", "mask", "cond", "mask_index", *self.extra)
        shared = {name: self.inputs[name] for name in self.inputs if name not in by_rank}
        return {"ids": self.ids} | shared


class BatchMaker:
    """Adds noise to latents, and collects the model's arguments."""

    def __init__(self, cfg: TrainConfig, device: torch.device) -> None:
        self.device = device
        self.process: DiffusionProcess = build_component(cfg.scheduler, SCHEDULERS)
        self.sample_inputs = cfg.model_spec.model_class.sample_inputs
        self.channels = cfg.model_spec.config.in_channels

    @torch.no_grad()
    def make(self, features: Features, draws: Draws, *, timestep: int = 0) -> Batch:
        """The batch of some clips at one of the timesteps that were drawn for each."""
        # Of degraded clips, the true latents follow.
        latents, *true = features.latents.split(self.channels, dim=1)
        geometry, numbers = size_conditions(
            self.process,
            self.sample_inputs,
            features.shape,
            features.fps,
            latent_frames=latents.shape[2],
        )

        draws = to_device(draws, self.device)
        t = self.process.timesteps_from(draws.timesteps[timestep], geometry)
        # On the CPU, where tokens are counted and the model checks masks.
        drop_caption = None if draws.drop_caption is None else torch.tensor(draws.drop_caption)
        x_mask = None if draws.frame_mask is None else torch.tensor(draws.frame_mask)
        inputs = dict(
            timestep=self.process.network_time(t),
            y=features.y,
            mask=features.mask,
            x_mask=x_mask,
            drop_caption=drop_caption,
            drop_path=draws.drop_path,
            **numbers,
            **conditioning_inputs(latents, draws),
            **features.extra,
        )
        if x_mask is not None:
            x_mask = to_device(x_mask, self.device)
        # The loss weighs these frames.
        index = () if draws.condition is None else draws.condition.index
        noised = Noised.of(self.process, latents, draws.noise, t, x_mask, index, *true)
        return Batch(noised, inputs, draws.ids, features.text_lengths, tuple(features.extra))


def conditioning_inputs(latents: Tensor, draws: Draws) -> dict[str, Any]:
    """Inputs of the model for conditioning frames that are not in ``x``.

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
