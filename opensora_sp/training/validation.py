"""Validation of a run while it trains: sampled videos, and the loss on held-out clips.

Both are computed by the ranks of a sequence-parallel group together, from the EMA or the current
weights: by the groups of training, or with ``sp_size="auto"`` by the largest ones that lie within a
node. All draws are keyed by the seed and their purpose, so training is the same
with and without validation.

Legend: K bins of timesteps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.checkpoint import checkpoint_name
from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.config.common import Common
from opensora_sp.config.sections import Validation
from opensora_sp.data import VideoTextDataset
from opensora_sp.evaluation.heldout import HeldoutLoss, none_readable
from opensora_sp.features.build import make_encoders
from opensora_sp.features.sources import DegradedClips, Encoders, Source
from opensora_sp.parallel.rank_groups import within_nodes
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import batches_of, check_requests, requests_of
from opensora_sp.sampling.run import write_batch

from .ema import ShardedEma

if TYPE_CHECKING:
    from opensora_sp.checkpoint import NamedShards
    from opensora_sp.runtime.watchdog import Watchdog

    from .metrics import Reporter
    from .trainer import Trainer

logger = logging.getLogger(__name__)
# In a run's folder: the videos of each validation.
VIDEOS = "validation"


def preflight_validation(cfg: TrainConfig) -> None:
    """Check the prompts and the manifest of validation, before a model exists.

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
        limits=cfg.limits,
        extra=cfg.extra_files,
        captions=cfg.dataset.captions,
    )


def sampling_config(cfg: TrainConfig, validation: Validation) -> InferenceConfig:
    """A config for sampling, with model, sizes, scheduler and validation of a training config."""
    common = {name: getattr(cfg, name) for name in Common.model_fields}
    del common["sp_size"]

    names = ("prompts", "negative_prompt", "num_samples", "fps", "batch_size", "format", "use_ema")
    sampling = {name: getattr(validation, name) for name in names}
    for name in ("num_sampling_steps", "cfg_scale"):
        if (value := getattr(validation, name)) is not None:
            common["scheduler"] = common["scheduler"] | {name: value}
    return InferenceConfig(**common, **sampling, precision=cfg.precision)


def encoders_of_validation(
    cfg: TrainConfig, source: Source, device: torch.device
) -> Encoders | None:
    """Those of training, or loaded where it reads a feature cache; None without validation."""
    if cfg.validation is None:
        return None
    if isinstance(source, DegradedClips):
        return source.plain
    return source if isinstance(source, Encoders) else make_encoders(cfg, device)


class Validator:
    """The validation of one run, if its config asks for it. ``after`` is called after each step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        mesh = trainer.mesh
        cut = within_nodes(mesh.family, mesh.ranks_per_node)
        self.group = next(group for group in cut if mesh.rank in group)
        self.replica, self.num_replicas = cut.index(self.group), len(cut)
        self.validation = trainer.cfg.validation
        self.heldout = heldout_clips(trainer.cfg)
        encoders = trainer.validation_encoders
        if self.validation is None or encoders is None:
            return

        cfg, device = trainer.cfg, trainer.device
        sampling = sampling_config(cfg, self.validation)
        self.pipeline = Pipeline(
            sampling, trainer.module, encoders.vae, encoders.text_encoder, device
        )
        if self.heldout is not None:
            self.loss = HeldoutLoss(
                trainer.model,
                trainer.module,
                trainer.mesh,
                self.heldout,
                encoders,
                trainer.batches,
                whole=cfg.sequence_parallel.verify,
            )

    def after(self, step: int, run_dir: Path, reporter: Reporter, watch: Watchdog | None) -> float:
        """Validate every ``validation.every`` steps; returns the seconds it took. Collective.

        Where a rank was asked to stop since the step, validation is skipped: the next step is the
        last one.
        """
        if self.validation is None or step % self.validation.every:
            return 0.0
        asked_to_stop = watch is not None and watch.stop_reason is not None
        stop = torch.tensor(float(asked_to_stop), device=self.trainer.device)
        dist.all_reduce(stop)
        if stop.item() and step < self.trainer.cfg.max_steps:
            self.trainer.asked_to_stop = True
            return 0.0

        since = time.perf_counter()
        folder = run_dir / VIDEOS / checkpoint_name(step)
        errors: list[str] = []
        with self.trainer.mesh.using(self.group):
            if self.validation.use_ema:
                with ema_weights(self.trainer.tensors.shards, self.trainer.ema):
                    losses = self._validate(folder, errors)
            else:
                losses = self._validate(folder, errors)

        self._report_errors(errors, reporter)
        reporter.validated(step, losses, folder)
        return time.perf_counter() - since

    def _report_errors(self, errors: list[str], reporter: Reporter) -> None:
        """Let rank 0 report what kept any rank from writing its videos. Collective.

        All videos are written when this returns.
        """
        of_ranks: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, errors)
        if reporter.enabled:
            for error in chain.from_iterable(of_ranks):
                reporter.outputs.report(f"{VIDEOS}/", error)

    @torch.no_grad()
    def _validate(self, folder: Path, errors: list[str]) -> list[float] | None:
        """Write the videos, and compute the losses of held-out clips.

        Args:
            errors: takes what is wrong with videos that this rank cannot write.
        """
        mesh, cfg = self.trainer.mesh, self.pipeline.cfg
        batches = batches_of(requests_of(cfg), cfg.batch_size, self.num_replicas)
        if batches:
            # Without a folder, each of its videos is an error.
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)

        for batch in batches[self.replica :: self.num_replicas]:
            parts = self.pipeline.looped(batch)
            write_batch(self.pipeline, batch, parts, mesh, folder, digest=None, errors=errors)
        return None if self.heldout is None else self._heldout_losses(self.heldout).tolist()

    def _heldout_losses(self, dataset: VideoTextDataset) -> Tensor:
        """The mean loss of the clips that all ranks can read, in each bin, ``[K]``. Collective."""
        assert self.validation is not None and dataset.shape is not None
        found = self.loss.measure(
            range(self.replica, len(dataset), self.num_replicas),
            dataset.shape,
            batch_size=self.validation.batch_size,
            bins=self.validation.bins,
            seeds=[self.trainer.cfg.seed],
        )
        if not found.clips:
            raise none_readable(
                "validation.manifest", dataset, dataset.shape, self.loss.corrupt.last
            )
        return found.losses[0]


@contextmanager
def ema_weights(shards: NamedShards, ema: ShardedEma) -> Iterator[None]:
    """Inside, the model has the EMA weights; then the same bits as before. Collective.

    The working weights are kept on the CPU meanwhile.
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
