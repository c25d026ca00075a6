"""One micro-batch of a training step: noised latents, and all that is drawn about them.

Legend: B clips, c latent channels, f x h x w latent size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opensora_sp.conditions import size_conditions
from opensora_sp.config import TrainConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.data import ClipShape
from opensora_sp.diffusion import DiffusionProcess, Noised, draw_frame_mask
from opensora_sp.randomness import generator, normal, uniform
from opensora_sp.transfer import to_device

from .sharded import Features
from .sources import Source


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
        shared = {name: one for name, one in self.inputs.items() if name not in ("y", "mask")}
        return {"ids": self.ids} | shared


class BatchMaker:
    """Draws everything random about clips, keyed by micro-batch and sample id, never by rank."""

    def __init__(
        self, cfg: TrainConfig, model_config: Any, source: Source, device: torch.device
    ) -> None:
        self.cfg, self.model_config, self.source, self.device = cfg, model_config, source, device
        self.flow: DiffusionProcess = build_component(cfg.scheduler, SCHEDULERS)
        self.sample_inputs = cfg.model_spec.model_class.sample_inputs

    @torch.no_grad()
    def make(self, micro_batch: int, ids: Sequence[int], features: Features) -> Batch:
        """The batch of ``features``; draws are keyed by the micro-batch's number and ``ids``."""
        seed, latents = self.cfg.seed, features.latents
        latent_frames = latents.shape[2]
        keys = [(micro_batch, sample) for sample in ids]
        geometry, numbers = size_conditions(
            self.flow,
            self.sample_inputs,
            features.shape,
            features.fps,
            latent_frames=latent_frames,
        )

        size = tuple(latents.shape[1:])
        noise = torch.stack([normal(size, seed, "noise", *key) for key in keys])
        noise = to_device(noise, self.device)

        t = torch.tensor([uniform(seed, "timestep", *key) for key in keys])
        t = self.flow.timesteps_from(to_device(t, self.device), geometry)

        x_mask = self._frame_masks(keys, latent_frames)
        inputs = dict(
            timestep=self.flow.network_time(t),
            y=features.y,
            mask=features.mask,
            x_mask=x_mask,
            drop_caption=self._drop_caption(keys),
            drop_path=self._drop_path(keys),
            **numbers,
        )
        if x_mask is not None:
            x_mask = to_device(x_mask, self.device)
        noised = Noised.of(self.flow, latents, noise, t, x_mask)
        clips = to_device(torch.tensor(ids), self.device)
        return Batch(noised, inputs, clips, features.text_lengths)

    def idle(self, shape: ClipShape) -> Batch:
        """One empty clip, which a replica without a micro-batch computes while others have one."""
        return self.make(0, [0], Features.filled(0.0, 1, shape, self.source, self.device))

    def _frame_masks(self, keys: list[tuple[int, int]], num_frames: int) -> Tensor | None:
        """bool ``[B, f]``, False for conditioning frames; equal within a patch of frames. On the
        CPU, where the model checks that.
        """
        ratios, patch = self.cfg.mask_ratios, self.model_config.patch_size[0]
        if ratios is None:
            return None
        patches = -(-num_frames // patch)
        draws = [generator(self.cfg.seed, "frame_mask", *key) for key in keys]
        masks = torch.stack([draw_frame_mask(ratios, patches, rng) for rng in draws])  # [B, T]
        return masks.repeat_interleave(patch, dim=1)[:, :num_frames]

    def _drop_caption(self, keys: list[tuple[int, int]]) -> Tensor | None:
        """bool ``[B]``, True for samples without caption; on the CPU, where tokens are counted."""
        rate = self.model_config.class_dropout_prob
        if not rate:
            return None
        return torch.tensor([uniform(self.cfg.seed, "drop_caption", *key) < rate for key in keys])

    def _drop_path(self, keys: list[tuple[int, int]]) -> Tensor | None:
        """bool ``[2 * depth, B]``, True for branches to drop, at rates that grow with the depth."""
        config = self.model_config
        if not config.drop_path:
            return None
        rates = torch.linspace(0, config.drop_path, config.depth, dtype=torch.float64)
        rates = rates.repeat_interleave(2)

        draws = [generator(self.cfg.seed, "drop_path", *key) for key in keys]
        numbers = [torch.from_numpy(rng.random(2 * config.depth)) for rng in draws]
        return to_device(torch.stack([n < rates for n in numbers], dim=1), self.device)
