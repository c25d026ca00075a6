"""One micro-batch of a training step: clips that all ranks of a replica agree on, encoded, noised, with their draws.

Legend: B clips, c latent channels, f x h x w latent size, L text tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.config import TrainConfig, build_component
from opensora_sp.config.schema import SCHEDULERS
from opensora_sp.data import BrokenClip, Clip, VideoTextDataset
from opensora_sp.diffusion import DiffusionProcess, Noised, draw_frame_mask
from opensora_sp.models import sample_numbers
from opensora_sp.models.registry import model_class
from opensora_sp.parallel import SequenceMesh
from opensora_sp.randomness import generator, normal, uniform

logger = logging.getLogger(__name__)
MAX_REPLACEMENTS = 20


@dataclass(frozen=True)
class Batch:
    """What the model and the loss take. ``inputs`` are the model's keyword arguments beside ``x``."""

    noised: Noised
    inputs: dict[str, Any]

    @property
    def x_t(self) -> Tensor:
        """What the model sees, ``[B, c, f, h, w]``."""
        return self.noised.x_t

    @property
    def target(self) -> Tensor:
        """What it learns to predict, ``[B, c, f, h, w]``."""
        return self.noised.target


class ClipPicker:
    """Readable clips for the ids of a micro-batch, the same on every rank of the SP group.

    A clip that any rank of the group cannot read is replaced, on all of them, by one drawn for this micro-batch and
    place. ``broken`` maps the paths found broken to the reason, ``files_read`` counts the clips used by kind of file.

    Raises:
        ValueError: if no replacement can be read either.
    """

    def __init__(self, dataset: VideoTextDataset, mesh: SequenceMesh, seed: int) -> None:
        self.dataset, self.mesh, self.seed = dataset, mesh, seed
        self.broken: dict[str, str] = {}
        self.files_read: Counter[str] = Counter()
        self.replaced = 0  # places of batches that got another clip; equal on all ranks of the group

    def pick(
        self, micro_batch: int, ids: Sequence[int], items: Sequence[Clip | BrokenClip]
    ) -> tuple[list[int], list[Clip]]:
        """The ids and clips to use, given what was read for ``ids``."""
        ids, items = list(ids), list(items)
        for attempt in range(MAX_REPLACEMENTS + 1):
            unreadable = self._unreadable(items)
            if not unreadable:
                self.files_read.update(self.dataset.rows[index][0].suffix for index in ids)
                return ids, items  # type: ignore[return-value]
            self.replaced += len(unreadable)
            for place in unreadable:
                ids[place] = self._replacement(micro_batch, place, attempt)
                items[place] = self.dataset[ids[place]]
        raise ValueError(
            f"got no readable clip in {MAX_REPLACEMENTS} tries for one place of a batch ({len(self.broken)} broken "
            f"files, the last: {next(reversed(self.broken.items()), None)}); expected video files; check the "
            "manifest's paths"
        )

    def _unreadable(self, items: Sequence[Clip | BrokenClip]) -> list[int]:
        """Places that this rank or a peer could not read."""
        for item in items:
            if isinstance(item, BrokenClip) and item.path not in self.broken:
                self.broken[item.path] = item.reason
                logger.warning("skipped a clip that cannot be read: %s (%s)", item.path, item.reason)
        readable = torch.tensor([isinstance(item, Clip) for item in items], dtype=torch.int32)
        if self.mesh.sp_size > 1:
            on_cuda = dist.get_backend(self.mesh.sp_group) == "nccl"
            readable = readable.cuda() if on_cuda else readable
            dist.all_reduce(readable, op=dist.ReduceOp.MIN, group=self.mesh.sp_group)
        return [place for place, ok in enumerate(readable.tolist()) if not ok]

    def _replacement(self, micro_batch: int, place: int, attempt: int) -> int:
        drawn = generator(self.seed, "replacement", micro_batch, place, attempt)
        return int(drawn.integers(len(self.dataset)))


class BatchMaker:
    """Encodes clips and draws everything random about them, keyed by micro-batch and sample id."""

    def __init__(self, cfg: TrainConfig, model_config: Any, vae: Any, text_encoder: Any, device: torch.device) -> None:
        self.cfg, self.model_config, self.device = cfg, model_config, device
        self.vae, self.text_encoder = vae, text_encoder
        self.flow: DiffusionProcess = build_component(cfg.scheduler, SCHEDULERS)

    @torch.no_grad()
    def make(self, micro_batch: int, ids: Sequence[int], clips: Sequence[Clip]) -> Batch:
        cfg, size = self.cfg, len(clips)
        latents = self.vae.encode(torch.stack([clip.video for clip in clips]).to(self.device)).float()
        y, mask = self.text_encoder.encode([clip.text for clip in clips])
        keys = [(micro_batch, sample) for sample in ids]
        noise = torch.stack([normal(tuple(latents.shape[1:]), cfg.seed, "noise", *key) for key in keys])
        noise = noise.to(self.device)
        height, width = (torch.full((size,), float(side), device=self.device) for side in cfg.size)
        geometry = self.flow.geometry(height, width, latent_frames=latents.shape[2], video_frames=cfg.num_frames)
        t = torch.tensor([uniform(cfg.seed, "timestep", *key) for key in keys], device=self.device)
        t = self.flow.timesteps_from(t, geometry)
        x_mask = self._frame_masks(keys, latents.shape[2])
        inputs = dict(
            timestep=self.flow.network_time(t),
            y=y.to(self.device),
            mask=mask.to(self.device),
            x_mask=x_mask,
            drop_caption=self._drop_caption(keys),
            drop_path=self._drop_path(keys),
        )
        fps = torch.tensor([clip.fps for clip in clips], device=self.device)
        names = model_class(cfg.model["type"]).sample_inputs
        inputs |= sample_numbers(names, height=height, width=width, fps=fps, num_frames=cfg.num_frames)
        return Batch(Noised.of(self.flow, latents, noise, t, x_mask), inputs)

    def _frame_masks(self, keys: list[tuple[int, int]], num_frames: int) -> Tensor | None:
        """bool ``[B, f]``, False for given frames; whole patches of frames are given or not."""
        ratios, patch = self.cfg.mask_ratios, self.model_config.patch_size[0]
        if ratios is None:
            return None
        draws = [generator(self.cfg.seed, "frame_mask", *key) for key in keys]
        masks = torch.stack([draw_frame_mask(ratios, -(-num_frames // patch), rng) for rng in draws])  # [B, T]
        return masks.repeat_interleave(patch, dim=1)[:, :num_frames].to(self.device)

    def _drop_caption(self, keys: list[tuple[int, int]]) -> Tensor | None:
        rate = self.model_config.class_dropout_prob
        if not rate:
            return None
        drawn = [uniform(self.cfg.seed, "drop_caption", *key) < rate for key in keys]
        return torch.tensor(drawn, device=self.device)

    def _drop_path(self, keys: list[tuple[int, int]]) -> Tensor | None:
        config = self.model_config
        if not config.drop_path:
            return None
        rates = torch.linspace(0, config.drop_path, config.depth, dtype=torch.float64).repeat_interleave(2)
        drawn = [generator(self.cfg.seed, "drop_path", *key).random(2 * config.depth) for key in keys]
        return torch.stack([torch.from_numpy(d) < rates for d in drawn], dim=1).to(self.device)  # [2 * depth, B]
