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
from opensora_sp.data import BatchPlan, BrokenClip, Clip, ClipShape, MicroBatch, Sample, VideoTextDataset, scale
from opensora_sp.diffusion import DiffusionProcess, Noised, draw_frame_mask
from opensora_sp.models import sample_numbers
from opensora_sp.models.registry import model_class
from opensora_sp.parallel import SequenceMesh
from opensora_sp.randomness import generator, normal, uniform

logger = logging.getLogger(__name__)
MAX_REPLACEMENTS = 20
ENOUGH_READ = 100  # clips, after which a fraction of broken ones means something


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
    """Readable clips for a micro-batch, the same on every rank of the SP group.

    A clip that any rank of the group cannot read is replaced, on all of them, by the one that the plan names for it.
    ``files_read`` counts the clips used by kind of file.

    Raises:
        ValueError: if no replacement can be read either, or too many clips are broken.
    """

    def __init__(self, dataset: VideoTextDataset, mesh: SequenceMesh, plan: BatchPlan, max_bad_fraction: float) -> None:
        self.dataset, self.mesh, self.plan, self.max_bad_fraction = dataset, mesh, plan, max_bad_fraction
        self.files_read: Counter[str] = Counter()
        self.read, self.replaced = 0, 0  # clips asked for, and those that got another; equal on all ranks of the group
        self.broken: dict[str, str] = {}  # path -> reason, of all ranks after ``tell``
        self._untold: dict[str, str] = {}  # what this rank has found since

    def pick(self, micro_batch: MicroBatch, items: Sequence[Clip | BrokenClip]) -> tuple[list[int], list[Clip]]:
        """The ids and clips to use, given what was read for the micro-batch's ids."""
        ids, items = list(micro_batch.ids), list(items)
        self.read += len(items)
        for attempt in range(MAX_REPLACEMENTS + 1):
            unreadable = self._unreadable(items)
            if not unreadable:
                self.files_read.update(self.dataset.rows[index].path.suffix for index in ids)
                return ids, items  # type: ignore[return-value]
            self.replaced += len(unreadable) if attempt == 0 else 0
            for place in unreadable:
                ids[place] = self.plan.replacement(micro_batch, micro_batch.ids[place], attempt)
                items[place] = self.dataset[Sample(ids[place], micro_batch.epoch, micro_batch.shape)]
        last = next(reversed(({**self.broken, **self._untold}).items()), None)
        raise ValueError(
            f"got no readable clip in {MAX_REPLACEMENTS} tries for one place of a batch of {micro_batch.shape} (the "
            f"last broken file: {last}); expected video files; check the manifest's paths"
        )

    def tell(self, device: torch.device) -> int:
        """Log what was found broken, each path once, on rank 0; returns the clips replaced so far. Collective."""
        counts = torch.tensor([self.read, self.replaced, len(self._untold)], device=device)
        dist.all_reduce(counts)
        read, replaced, untold = counts.tolist()
        read, replaced = read // self.mesh.sp_size, replaced // self.mesh.sp_size
        if untold:
            found: list[dict[str, str]] = [{}] * dist.get_world_size()
            dist.all_gather_object(found, self._untold)
            new = {path: reason for of_rank in found for path, reason in of_rank.items() if path not in self.broken}
            for path, reason in new.items() if self.mesh.rank == 0 else ():
                logger.warning("skipped a clip that cannot be read: %s (%s)", path, reason)
            self.broken |= new
            self._untold = {}
        if replaced > self.max_bad_fraction * max(read, min(ENOUGH_READ, len(self.dataset))):
            raise ValueError(
                f"got {replaced} broken clips of {read} read, the last {next(reversed(self.broken.items()))}; expected "
                f"at most dataset.max_bad_fraction = {self.max_bad_fraction:g} of them; check the files that train.log "
                "names, or raise max_bad_fraction"
            )
        return replaced

    def _unreadable(self, items: Sequence[Clip | BrokenClip]) -> list[int]:
        """Places that this rank or a peer could not read."""
        for item in items:
            if isinstance(item, BrokenClip) and item.path not in self.broken:
                self._untold[item.path] = item.reason
        readable = torch.tensor([isinstance(item, Clip) for item in items], dtype=torch.int32)
        if self.mesh.sp_size > 1:
            dist.all_reduce(readable, op=dist.ReduceOp.MIN, group=self.mesh.host_group)
        return [place for place, ok in enumerate(readable.tolist()) if not ok]


class BatchMaker:
    """Encodes clips and draws everything random about them, keyed by micro-batch and sample id."""

    def __init__(self, cfg: TrainConfig, model_config: Any, vae: Any, text_encoder: Any, device: torch.device) -> None:
        self.cfg, self.model_config, self.device = cfg, model_config, device
        self.vae, self.text_encoder = vae, text_encoder
        self.flow: DiffusionProcess = build_component(cfg.scheduler, SCHEDULERS)

    @torch.no_grad()
    def make(self, micro_batch: int, ids: Sequence[int], clips: Sequence[Clip]) -> Batch:
        """Batch of ``clips``, all of one shape, which draws are made for as ``ids`` of micro-batch ``micro_batch``."""
        cfg, size = self.cfg, len(clips)
        num_frames, *sides = clips[0].video.shape[1:]
        videos = scale(torch.stack([clip.video for clip in clips]).to(self.device))  # [B, 3, F, height, width]
        latents = self.vae.encode(videos).float()
        y, mask = self.text_encoder.encode([clip.text for clip in clips])
        keys = [(micro_batch, sample) for sample in ids]
        noise = torch.stack([normal(tuple(latents.shape[1:]), cfg.seed, "noise", *key) for key in keys])
        noise = noise.to(self.device)
        height, width = (torch.full((size,), float(side), device=self.device) for side in sides)
        geometry = self.flow.geometry(height, width, latent_frames=latents.shape[2], video_frames=num_frames)
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
        inputs |= sample_numbers(names, height=height, width=width, fps=fps, num_frames=num_frames)
        return Batch(Noised.of(self.flow, latents, noise, t, x_mask), inputs)

    def stand_in(self, shape: ClipShape) -> Batch:
        """What a rank computes on, for nothing, while others have a micro-batch and it has none: one black clip."""
        return self.make(0, [0], [Clip(torch.zeros(3, *shape, dtype=torch.uint8), "", 24.0)])

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
