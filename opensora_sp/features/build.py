"""From a training config to its dataset, encoders, order of clips and predicted seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from opensora_sp.common.tensors import DTYPES
from opensora_sp.config import TrainConfig, build_component
from opensora_sp.data.bucket_plan import BucketPlan
from opensora_sp.data.buckets import Buckets
from opensora_sp.data.cache import CachedFeatures
from opensora_sp.data.dataset import ClipShape, VideoTextDataset
from opensora_sp.data.sampler import BatchPlan, MicroBatch, MicroBatchPlan
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS, planned_latent_size
from opensora_sp.models.recompute import levels_of
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.options import Options
from opensora_sp.parallel.rank_groups import RankGroup
from opensora_sp.planner.memory import recomputed_share
from opensora_sp.planner.seconds import ModelFlops, blocks_work, seconds_of
from opensora_sp.runtime.cost_models import cost_model_of

from .sources import CachedSource, DegradedClips, Encoders, Source

TrainingSet = VideoTextDataset | CachedFeatures
# Options of a dataset that its class does not take.
NOT_OF_FILES = {"type", "path", "max_bad_fraction"}


def make_dataset(cfg: TrainConfig) -> TrainingSet:
    """The config's clips, of one shape unless it has buckets; or a feature cache of them."""
    if cfg.dataset.type == "CachedFeatures":
        assert cfg.dataset.path is not None
        return CachedFeatures(cfg.dataset.path, cfg.extra_files)

    assert cfg.dataset.manifest is not None
    bucketed = cfg.bucket_config is not None
    return VideoTextDataset(
        num_frames=None if bucketed else cfg.num_frames,
        image_size=None if bucketed else cfg.size,
        seed=cfg.seed,
        limits=cfg.limits,
        extra=cfg.extra_files,
        **cfg.dataset.model_dump(exclude=NOT_OF_FILES),
    )


def make_source(cfg: TrainConfig, dataset: TrainingSet, device: torch.device) -> Source:
    """The source of the dataset's latents and text features; for a cache no encoder is loaded."""
    if isinstance(dataset, CachedFeatures):
        return CachedSource(dataset, device)
    encoders = make_encoders(cfg, device)
    if not cfg.noise_augmentation:
        return encoders
    assert cfg.noise_prob is not None and cfg.noise_strength is not None
    return DegradedClips(encoders, cfg.seed, cfg.noise_prob, cfg.noise_strength)


def make_encoders(cfg: TrainConfig, device: torch.device) -> Encoders:
    """The config's encoders, loaded."""
    vae = build_component(cfg.vae, LATENT_ENCODERS).to(device)
    return Encoders(vae, build_component(cfg.text_encoder, TEXT_ENCODERS).to(device), device)


def make_plan(cfg: TrainConfig, dataset: TrainingSet, micro_batches_per_step: int) -> BatchPlan:
    """The sequence of micro-batches of a run."""
    if cfg.bucket_config is not None:
        return BucketPlan(
            dataset.rows,
            cfg.bucket_config,
            frame_interval=cfg.dataset.frame_interval,
            micro_batches_per_step=micro_batches_per_step,
            seed=cfg.seed,
            cost=Work(cfg, dataset).flops,
            batch_order=cfg.batch_order,
        )

    return MicroBatchPlan(
        num_samples=len(dataset),
        batch_size=cfg.batch_size,
        micro_batches_per_step=micro_batches_per_step,
        seed=cfg.seed,
        shape=ClipShape(cfg.num_frames, *cfg.size),
        too_short=too_short(cfg, dataset),
    )


def too_short(cfg: TrainConfig, dataset: TrainingSet) -> tuple[int, ...]:
    """The clips that have too few frames for ``num_frames``, according to the manifest."""
    span = (cfg.num_frames - 1) * cfg.dataset.frame_interval + 1
    return tuple(np.flatnonzero(dataset.rows.column("num_frames") < span).tolist())


def with_length(cfg: TrainConfig, plan: BatchPlan) -> TrainConfig:
    """The config with ``max_steps``, from ``epochs`` if it has these, all as long as the first."""
    if cfg.epochs is None:
        return cfg
    return cfg.model_copy(update={"max_steps": math.ceil(cfg.epochs * plan.steps_per_epoch)})


def order_state(cfg: TrainConfig, plan: BatchPlan, num_samples: int) -> dict[str, Any]:
    """State of a checkpoint that data order and random draws depend on."""
    state: dict[str, Any] = {
        "seed": cfg.seed,
        "accumulation_steps": cfg.accumulation_steps,
        "batch_size": cfg.batch_size,
        "num_samples": num_samples,
    }
    if isinstance(plan, MicroBatchPlan):
        state["num_samples"] = len(plan.clips)
    if isinstance(plan, BucketPlan):
        state |= {"batch_size": None, "buckets": plan.fingerprint, "batch_order": plan.batch_order}
    return state


def micro_batches_of_step(cfg: TrainConfig, state: dict[str, Any], world_size: int) -> int:
    """Micro-batches of a step: the config's, the checkpoint's, or some for each replica."""
    if cfg.micro_batches_per_step is None and "micro_batches_per_step" in state:
        return int(state["micro_batches_per_step"])
    # With "auto" a rank may be a replica.
    replicas = max(1, world_size // cfg.sp_size) if isinstance(cfg.sp_size, int) else world_size
    return cfg.micro_batches(replicas)


def largest_batch(cfg: TrainConfig) -> int:
    """Bytes of the clips of the largest micro-batch, uint8 ``[3, frames, height, width]`` each."""
    if cfg.bucket_config is None:
        return 3 * cfg.batch_size * math.prod(cfg.clip_shape)
    return max(
        # Where a batch size is chosen later, one clip is counted.
        3 * (entry.batch_size or 1) * math.prod(entry.shape_at(9 / 16))
        for entry in Buckets.of(cfg.bucket_config).kept
    )


class Work:
    """Tokens and estimated work of the model on clips of a shape."""

    def __init__(
        self, cfg: TrainConfig, dataset: TrainingSet | None = None, options: Options | None = None
    ) -> None:
        self.cfg, self.vae, self.model = cfg, cfg.vae, cfg.model_spec.config
        if options is None:
            options = cfg.parallel_options(cost_model_of(cfg.cost_model))
        self.options = options
        self.sizes = dataset.sizes if isinstance(dataset, CachedFeatures) else {}
        self.shape_of = lru_cache(maxsize=None)(self._shape_of)
        self.seconds = lru_cache(maxsize=None)(self._seconds)

    def tokens(self, clip: ClipShape) -> int:
        """Tokens of one clip."""
        return self.shape_of(clip, 1).tokens

    def flops(self, clip: ClipShape, num_samples: int) -> float:
        """Forward work of the blocks."""
        return blocks_work(self.shape_of(clip, num_samples))

    def _seconds(self, clip: ClipShape, num_samples: int, ranks: int, spans_nodes: bool) -> float:
        """Predicted seconds of a micro-batch on the busiest of ``ranks`` that share it: forward,
        recomputation, backward and exchanges, by the cost model of ``options``.

        With ``grad_checkpoint="auto"``, all blocks count as recomputed.
        """
        return seconds_of(
            self.shape_of(clip, num_samples),
            replace(self.options, spans_nodes=spans_nodes),
            ranks,
            model=self._flops,
            element_size=DTYPES[self.cfg.precision].itemsize,
            recomputed=self._recomputed,
        )

    @cached_property
    def _flops(self) -> ModelFlops:
        return ModelFlops.planned(self.cfg.model_spec.name, self.model, self.cfg.lora)

    @cached_property
    def _recomputed(self) -> float:
        """Share of a forward pass that backward repeats."""
        setting = self.cfg.grad_checkpoint
        levels = levels_of(True if setting == "auto" else setting, self.model.num_blocks)
        return recomputed_share(levels)

    def _shape_of(self, clip: ClipShape, num_samples: int) -> BatchShape:
        # A feature cache knows the size of its latents without the encoder.
        size = self.sizes.get(clip) or planned_latent_size(self.vae, *clip)
        return BatchShape.of(self.model, num_samples, size)


class GroupSeconds:
    """``data.schedule.Seconds`` of a config: equal on all ranks, and quick once it is cached.

    Args:
        ranks_per_node: larger groups exchange over the network, and so do groups of one degree
            that does not divide it.
        least_ranks: by bucket, the fewest ranks whose memory its batches fit; 1 where it is not in.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        work: Work,
        *,
        ranks_per_node: int,
        least_ranks: Mapping[str, int] | None = None,
    ) -> None:
        self.work, self.ranks_per_node = work, ranks_per_node
        self.least_ranks = least_ranks or {}
        self.has_one_degree = isinstance(cfg.sp_size, int)
        self.degrees: Mapping[str, int] = cfg.sp_size if isinstance(cfg.sp_size, dict) else {}

    def __call__(self, micro_batch: MicroBatch, group: RankGroup) -> float:
        """Seconds of forward, recomputation and backward; infinity where it may not run."""
        degree = self.degrees.get(micro_batch.bucket, group.size)
        if group.size != degree or group.size < self.least_ranks.get(micro_batch.bucket, 1):
            return math.inf
        spans_nodes = group.size > self.ranks_per_node
        if self.has_one_degree:
            spans_nodes |= self.ranks_per_node % group.size > 0
        num_samples = len(micro_batch.ids)
        return self.work.seconds(micro_batch.shape, num_samples, group.size, spans_nodes)
