"""Looking at a run while it trains: sampled videos, and the loss of clips that are not trained on.

Both are made by the ranks of an SP group together, as in training, from the averaged or the current weights. All draws
are named by the seed and what they are for, so the training's own numbers are the same with and without validation.

Legend: B clips, c latent channels, f x h x w latent size, K bins of timesteps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.config.schema import Common, Validation
from opensora_sp.data import BrokenClip, Clip, VideoTextDataset, scale
from opensora_sp.diffusion import Noised
from opensora_sp.models import sample_numbers
from opensora_sp.randomness import normal, uniform
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import batches_of, check_requests, requests_of
from opensora_sp.sampling.run import write_batch
from opensora_sp.weights import checkpoint_name

from .ema import ShardedEma

if TYPE_CHECKING:
    from opensora_sp.plugin import NamedShards

    from .metrics import Reporter
    from .run import Run

logger = logging.getLogger(__name__)


def preflight_validation(cfg: TrainConfig) -> None:
    """Check what validation will sample and read, before a model exists.

    Raises:
        ValueError: as ``sampling.run.preflight`` and ``VideoTextDataset`` do.
    """
    if cfg.validation is not None:
        sampling = sampling_config(cfg, cfg.validation)
        check_requests(sampling, requests_of(sampling))
        heldout_clips(cfg)


def heldout_clips(cfg: TrainConfig) -> VideoTextDataset | None:
    """The clips of ``validation.manifest``, cut as those of training; None without one."""
    if cfg.validation is None or cfg.validation.manifest is None:
        return None
    return VideoTextDataset(
        cfg.validation.manifest,
        num_frames=cfg.num_frames,
        image_size=cfg.size,
        frame_interval=cfg.dataset.frame_interval,
        time_limit=cfg.dataset.time_limit,
        cache=cfg.dataset.cache,
    )


def sampling_config(cfg: TrainConfig, validation: Validation) -> InferenceConfig:
    """What the training config says about sampling: its model, sizes and scheduler, and its validation."""
    common = {name: getattr(cfg, name) for name in Common.model_fields if name not in ("sp_size", "scheduler")}
    names = ("prompts", "negative_prompt", "num_samples", "fps", "batch_size", "format", "use_ema")
    said = {name: getattr(validation, name) for name in names}
    steps = {name: getattr(validation, name) for name in ("num_sampling_steps", "cfg_scale")}
    scheduler = cfg.scheduler | {name: value for name, value in steps.items() if value is not None}
    return InferenceConfig(**common, **said, scheduler=scheduler, precision=cfg.precision)


class Validator:
    """The validation of one run, if its config asks for it; ``after`` is called when a step is done."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.validation = run.cfg.validation
        self.heldout = heldout_clips(run.cfg)
        self.broken: BrokenClip | None = None  # the last that this rank could not read
        if self.validation is None:
            return
        sampling = sampling_config(run.cfg, self.validation)
        self.pipeline = Pipeline(sampling, run.module, run.batches.vae, run.batches.text_encoder, run.device)

    def after(self, step: int, run_dir: Path, reporter: Reporter) -> float:
        """Validate if it is time to; returns the seconds that took. Collective."""
        if self.validation is None or step % self.validation.every:
            return 0.0
        since = time.perf_counter()
        folder = run_dir / "validation" / checkpoint_name(step)
        if self.validation.use_ema:
            with averaged(self.run.tensors.shards, self.run.ema):
                losses = self._validate(folder)
        else:
            losses = self._validate(folder)
        dist.barrier()  # all videos are written
        reporter.validated(step, losses, folder)
        return time.perf_counter() - since

    @torch.no_grad()
    def _validate(self, folder: Path) -> list[float] | None:
        mesh, cfg = self.run.mesh, self.pipeline.cfg
        batches = batches_of(requests_of(cfg), cfg.batch_size, mesh.dp_size)
        if batches:
            folder.mkdir(parents=True, exist_ok=True)
        for batch in batches[mesh.dp_rank :: mesh.dp_size]:
            write_batch(self.pipeline, batch, self.pipeline.looped(batch), mesh, folder, None)
        return None if self.heldout is None else self._heldout_losses(self.heldout).tolist()

    def _heldout_losses(self, dataset: VideoTextDataset) -> Tensor:
        """The mean loss of the clips that all ranks can read, in each bin, ``[K]``. Collective.

        Bin k holds the k-th part of the timesteps that training draws, from data to noise, so that the mean of the
        bins is the loss that training would have on these clips.
        """
        assert self.validation is not None
        mesh, size = self.run.mesh, self.validation.batch_size
        bins = self.validation.bins
        sums = torch.zeros(bins + 1, device=self.run.device)  # and the number of clips
        mine = range(mesh.dp_rank, len(dataset), mesh.dp_size)
        for start in range(0, len(mine), size):
            kept = self._readable({i: dataset[i] for i in mine[start : start + size]})
            if kept:
                sums[:bins] += self._losses(list(kept), list(kept.values()), bins)
                sums[bins] += len(kept) / mesh.sp_size
        dist.all_reduce(sums)
        if not sums[bins]:
            raise ValueError(
                f"got {len(dataset)} clips in validation.manifest {self.validation.manifest!r}, none of which can be "
                f"cut to {dataset.shape} (the last one: {self.broken}); expected videos that are long enough; check "
                "the manifest's paths and their lengths"
            )
        return sums[:bins] / sums[bins]

    def _readable(self, items: dict[int, Clip | BrokenClip]) -> dict[int, Clip]:
        """Those that every rank of the SP group could read, by index. Collective in the group."""
        for item in items.values():
            if isinstance(item, BrokenClip):
                self.broken = item
                logger.warning("left out of validation: %s (%s)", item.path, item.reason)
        readable = torch.tensor([isinstance(item, Clip) for item in items.values()], dtype=torch.int32)
        if self.run.mesh.sp_size > 1:
            dist.all_reduce(readable, op=dist.ReduceOp.MIN, group=self.run.mesh.host_group)
        return {i: item for (i, item), ok in zip(items.items(), readable.tolist(), strict=True) if ok}  # type: ignore[misc]

    def _losses(self, ids: list[int], clips: list[Clip], bins: int) -> Tensor:
        """This rank's part of the sum of the clips' losses in each bin, ``[K]``."""
        run, seed, flow = self.run, self.run.cfg.seed, self.run.batches.flow
        video = scale(torch.stack([clip.video for clip in clips]).to(run.device))  # [B, 3, F, height, width]
        latents = self.pipeline.vae.encode(video).float()  # [B, c, f, h, w]
        noise = torch.stack([normal(tuple(latents.shape[1:]), seed, "validation_noise", i) for i in ids]).to(latents)
        num_frames, *pixels = video.shape[2:]
        height, width = (torch.full((len(ids),), float(side), device=run.device) for side in pixels)
        geometry = flow.geometry(height, width, latent_frames=latents.shape[2], video_frames=num_frames)
        fps = torch.tensor([clip.fps for clip in clips], device=run.device)
        numbers = sample_numbers(run.module.sample_inputs, height=height, width=width, fps=fps, num_frames=num_frames)
        y, mask = self.pipeline.text_encoder.encode([clip.text for clip in clips])
        text = run.module.encode_text(y.to(run.device), mask.to(run.device))
        sums = []
        for k in range(bins):
            shares = [(k + uniform(seed, "validation_timestep", i, k)) / bins for i in ids]
            t = flow.timesteps_from(torch.tensor(shares, device=run.device), geometry)
            noised = Noised.of(flow, latents, noise, t, None)
            shard = run.model(noised.x_t, timestep=flow.network_time(t), y=text, **numbers, output="shards")
            sums.append(flow.losses(shard, noised).sum())
        return torch.stack(sums)


@contextmanager
def averaged(shards: NamedShards, ema: ShardedEma) -> Iterator[None]:
    """The model computes with the averaged weights inside, and with the very bits it had before afterwards.

    Those wait on the CPU. Collective.
    """
    with torch.no_grad():
        kept = {name: p.detach().to("cpu", copy=True) for name, p in shards.working.items()}
        for name, p in shards.working.items():
            p.copy_(shards.whole(name, ema.shards[name]))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in shards.working.items():
                p.copy_(kept[name])
