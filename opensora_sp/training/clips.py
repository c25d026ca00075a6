"""What a training config's clips are, and in which order they are trained on."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from opensora_sp.config import TrainConfig, split_type
from opensora_sp.data import BatchPlan, BucketPlan, ClipShape, MicroBatchPlan, VideoTextDataset
from opensora_sp.encoders import planned_latent_size
from opensora_sp.models.registry import resolve_config
from opensora_sp.parallel import Options
from opensora_sp.planner.sharing import Shape, busiest_work


def make_dataset(cfg: TrainConfig) -> VideoTextDataset:
    """The config's clips; of one shape, unless it has buckets."""
    bucketed = cfg.bucket_config is not None
    return VideoTextDataset(
        num_frames=None if bucketed else cfg.num_frames,
        image_size=None if bucketed else cfg.size,
        seed=cfg.seed,
        **cfg.dataset.model_dump(exclude={"type", "max_bad_fraction"}),
    )


def make_plan(cfg: TrainConfig, dataset: VideoTextDataset, micro_batches_per_step: int) -> BatchPlan:
    """The sequence of micro-batches of a run."""
    if cfg.bucket_config is None:
        assert dataset.shape is not None
        return MicroBatchPlan(
            num_samples=len(dataset),
            batch_size=cfg.batch_size,
            micro_batches_per_step=micro_batches_per_step,
            seed=cfg.seed,
            shape=dataset.shape,
        )
    return BucketPlan(
        dataset.rows,
        cfg.bucket_config,
        frame_interval=cfg.dataset.frame_interval,
        micro_batches_per_step=micro_batches_per_step,
        seed=cfg.seed,
        cost=Work(cfg).flops,
    )


def with_length(cfg: TrainConfig, plan: BatchPlan) -> TrainConfig:
    """The config with ``max_steps``: as it says, or as many as its epochs have if all are as long as the first."""
    if cfg.epochs is None:
        return cfg
    return cfg.model_copy(update={"max_steps": math.ceil(cfg.epochs * plan.steps_per_epoch)})


def order_state(cfg: TrainConfig, plan: BatchPlan, num_samples: int) -> dict[str, Any]:
    """What data order and draws depend on, as a checkpoint keeps it."""
    state: dict[str, Any] = {"seed": cfg.seed, "batch_size": cfg.batch_size, "num_samples": num_samples}
    if isinstance(plan, BucketPlan):
        state |= {"batch_size": None, "buckets": plan.fingerprint}
    return state


class Work:
    """Tokens and estimated work of the model on clips of a shape."""

    def __init__(self, cfg: TrainConfig) -> None:
        name, options = split_type("model", cfg.model)
        self.vae, self.model = cfg.vae, resolve_config(name, **options)
        self.shape_of = lru_cache(maxsize=None)(self._shape_of)

    def _shape_of(self, clip: ClipShape, num_samples: int) -> Shape:
        return Shape.of(self.model, num_samples, planned_latent_size(self.vae, *clip))

    def tokens(self, clip: ClipShape) -> int:
        return self.shape_of(clip, 1).tokens

    def flops(self, clip: ClipShape, num_samples: int) -> float:
        """Forward work of the blocks."""
        return busiest_work(self.shape_of(clip, num_samples), Options(), 1)
