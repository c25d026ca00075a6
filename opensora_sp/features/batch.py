"""One micro-batch of a training step: latents noised, with everything that is drawn about them.

Legend: B clips, c latent channels, f x h x w latent size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opensora_sp.config import TrainConfig, build_component
from opensora_sp.config.schema import SCHEDULERS
from opensora_sp.data import ClipShape
from opensora_sp.diffusion import DiffusionProcess, Noised, draw_frame_mask
from opensora_sp.models import sample_numbers
from opensora_sp.randomness import generator, normal, uniform
from opensora_sp.transfer import to_device

from .sharded import Features, Source


@dataclass(frozen=True)
class Batch:
    """What the model and the loss take. ``inputs`` are the model's keyword arguments beside ``x``.

    Under sequence parallelism latents are NaN in what this rank neither embeds nor compares, see ``features``.
    """

    noised: Noised
    inputs: dict[str, Any]
    ids: Tensor  # int64 [B], of the clips
    text_lengths: list[int]  # tokens of each caption, also of those that are not here

    @property
    def x_t(self) -> Tensor:
        """What the model sees, ``[B, c, f, h, w]``."""
        return self.noised.x_t

    @property
    def target(self) -> Tensor:
        """What it learns to predict, ``[B, c, f, h, w]``."""
        return self.noised.target

    @property
    def of_group(self) -> dict[str, Any]:
        """What every rank of a group holds alike: of latents and captions each has the part that it needs."""
        return {"ids": self.ids} | {
            name: one for name, one in self.inputs.items() if name not in ("y", "mask")
        }


class BatchMaker:
    """Draws everything random about clips, keyed by micro-batch and sample id: alike on all ranks of a group."""

    def __init__(
        self, cfg: TrainConfig, model_config: Any, source: Source, device: torch.device
    ) -> None:
        self.cfg, self.model_config, self.source, self.device = cfg, model_config, source, device
        self.flow: DiffusionProcess = build_component(cfg.scheduler, SCHEDULERS)

    @torch.no_grad()
    def make(self, micro_batch: int, ids: Sequence[int], features: Features) -> Batch:
        """Batch of ``features``, which draws are made for as ``ids`` of micro-batch ``micro_batch``."""
        cfg, size, latents = self.cfg, len(ids), features.latents
        num_frames, *sides = features.shape
        keys = [(micro_batch, sample) for sample in ids]
        noise = torch.stack(
            [normal(tuple(latents.shape[1:]), cfg.seed, "noise", *key) for key in keys]
        )
        noise = to_device(noise, self.device)
        height, width = (torch.full((size,), float(side), device=self.device) for side in sides)
        geometry = self.flow.geometry(
            height, width, latent_frames=latents.shape[2], video_frames=num_frames
        )
        t = torch.tensor([uniform(cfg.seed, "timestep", *key) for key in keys])
        t = self.flow.timesteps_from(to_device(t, self.device), geometry)
        x_mask = self._frame_masks(keys, latents.shape[2])
        inputs = dict(
            timestep=self.flow.network_time(t),
            y=features.y,
            mask=features.mask,
            x_mask=x_mask,
            drop_caption=self._drop_caption(keys),
            drop_path=self._drop_path(keys),
        )
        names = cfg.model_spec.model_class.sample_inputs
        inputs |= sample_numbers(
            names, height=height, width=width, fps=features.fps, num_frames=num_frames
        )
        noised = Noised.of(self.flow, latents, noise, t, x_mask)
        return Batch(
            noised, inputs, to_device(torch.tensor(ids), self.device), features.text_lengths
        )

    def stand_in(self, shape: ClipShape) -> Batch:
        """What a rank computes on, for nothing, while others have a micro-batch and it has none: one empty clip."""
        return self.make(0, [0], Features.filled(0.0, 1, shape, self.source, self.device))

    def _frame_masks(self, keys: list[tuple[int, int]], num_frames: int) -> Tensor | None:
        """bool ``[B, f]``, False for given frames; whole patches of frames are given or not."""
        ratios, patch = self.cfg.mask_ratios, self.model_config.patch_size[0]
        if ratios is None:
            return None
        draws = [generator(self.cfg.seed, "frame_mask", *key) for key in keys]
        masks = torch.stack(
            [draw_frame_mask(ratios, -(-num_frames // patch), rng) for rng in draws]
        )  # [B, T]
        return to_device(masks.repeat_interleave(patch, dim=1)[:, :num_frames], self.device)

    def _drop_caption(self, keys: list[tuple[int, int]]) -> Tensor | None:
        rate = self.model_config.class_dropout_prob
        if not rate:
            return None
        drawn = [uniform(self.cfg.seed, "drop_caption", *key) < rate for key in keys]
        return torch.tensor(drawn)  # stays on the CPU, where the model counts text tokens

    def _drop_path(self, keys: list[tuple[int, int]]) -> Tensor | None:
        config = self.model_config
        if not config.drop_path:
            return None
        rates = torch.linspace(
            0, config.drop_path, config.depth, dtype=torch.float64
        ).repeat_interleave(2)
        drawn = [
            generator(self.cfg.seed, "drop_path", *key).random(2 * config.depth) for key in keys
        ]
        dropped = torch.stack([torch.from_numpy(d) < rates for d in drawn], dim=1)  # [2 * depth, B]
        return to_device(dropped, self.device)
