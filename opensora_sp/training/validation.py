"""Looking at a run while it trains: sampled videos, and the loss of clips that are not trained on.

Both are made by the ranks of an SP group together, as in training, from the averaged or the current weights. All draws
are named by the seed and what they are for, so the training's own numbers are the same with and without validation.

Legend: B clips, c latent channels, f x h x w latent size, K bins of timesteps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.checkpoint import checkpoint_name
from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.config.schema import Common, Validation
from opensora_sp.data import MicroBatch, VideoTextDataset
from opensora_sp.diffusion import Noised
from opensora_sp.features.build import make_encoders
from opensora_sp.features.corrupt_samples import BrokenClips
from opensora_sp.features.sharded import Encoders, Features, SharedClips
from opensora_sp.models import sample_numbers
from opensora_sp.randomness import normal, uniform
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import batches_of, check_requests, requests_of
from opensora_sp.sampling.run import write_batch

from .ema import ShardedEma

if TYPE_CHECKING:
    from opensora_sp.plugin import NamedShards
    from opensora_sp.runtime import Watchdog

    from .metrics import Reporter
    from .trainer import Run

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
    common = {
        name: getattr(cfg, name)
        for name in Common.model_fields
        if name not in ("sp_size", "scheduler")
    }
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
        if self.validation is None:
            return
        sampling = sampling_config(run.cfg, self.validation)
        found = (
            run.source if isinstance(run.source, Encoders) else make_encoders(run.cfg, run.device)
        )
        self.pipeline = Pipeline(sampling, run.module, found.vae, found.text_encoder, run.device)
        if self.heldout is not None:
            self.broken = BrokenClips(self.heldout.rows, run.mesh, max_bad_fraction=1.0)
            self.clips = SharedClips(
                run.mesh, run.module, self.heldout, run.plan, found, self.broken, run.device
            )

    def after(self, step: int, run_dir: Path, reporter: Reporter, watch: Watchdog | None) -> float:
        """Validate if it is time to; returns the seconds that took. Collective.

        Where a rank was asked to stop since the step, the run goes straight on to the next one, its last.
        """
        if self.validation is None or step % self.validation.every:
            return 0.0
        asked_to_stop = watch is not None and watch.stop_reason is not None
        stop = torch.tensor(float(asked_to_stop), device=self.run.device)
        dist.all_reduce(stop)
        if stop.item() and step < self.run.cfg.max_steps:
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
            ids, features = self._readable(mine[start : start + size])
            if ids:
                sums[:bins] += self._losses(ids, features, bins)
                sums[bins] += len(ids) / mesh.sp_size
        dist.all_reduce(sums)
        self.broken.tell(self.run.device)
        if not sums[bins]:
            raise ValueError(
                f"got {len(dataset)} clips in validation.manifest {self.validation.manifest!r}, none of which can be "
                f"cut to {dataset.shape} (the last one: {self.broken.last}); expected videos that are long enough; "
                "check the manifest's paths and their lengths"
            )
        return sums[:bins] / sums[bins]

    def _readable(self, chosen: Sequence[int]) -> tuple[list[int], Features]:
        """Those of some clips that can be read, and their features. Collective in the group."""
        assert self.heldout is not None and self.heldout.shape is not None
        ids, shape = list(chosen), self.heldout.shape
        while True:
            features = Features.filled(
                float("nan"), len(ids), shape, self.clips.source, self.run.device
            )
            batch = MicroBatch(0, 0, shape, tuple(ids), 0.0)
            items = [self.heldout[sample] for sample in self.clips.samples(batch)] if ids else []
            unreadable = self.clips.share(features, ids, range(len(ids)), items) if ids else []
            if not unreadable:
                return ids, features
            ids = [index for place, index in enumerate(ids) if place not in unreadable]

    def _losses(self, ids: list[int], features: Features, bins: int) -> Tensor:
        """This rank's part of the sum of the clips' losses in each bin, ``[K]``."""
        run, seed, flow = self.run, self.run.cfg.seed, self.run.batches.flow
        latents = features.latents  # [B, c, f, h, w]
        noise = torch.stack(
            [normal(tuple(latents.shape[1:]), seed, "validation_noise", i) for i in ids]
        ).to(latents)
        num_frames, *pixels = features.shape
        height, width = (torch.full((len(ids),), float(side), device=run.device) for side in pixels)
        geometry = flow.geometry(
            height, width, latent_frames=latents.shape[2], video_frames=num_frames
        )
        names, fps = run.module.sample_inputs, features.fps
        numbers = sample_numbers(names, height=height, width=width, fps=fps, num_frames=num_frames)
        text = run.module.encode_text(features.y, features.mask)
        sums = []
        for k in range(bins):
            shares = [(k + uniform(seed, "validation_timestep", i, k)) / bins for i in ids]
            t = flow.timesteps_from(torch.tensor(shares, device=run.device), geometry)
            noised = Noised.of(flow, latents, noise, t, None)
            shard = run.model(
                noised.x_t, timestep=flow.network_time(t), y=text, **numbers, output="shards"
            )
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
