"""What a training config's clips are, and in which order they are trained on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from opensora_sp.config import TrainConfig, split_type
from opensora_sp.data import BatchPlan, BucketPlan, ClipShape, MicroBatchPlan, VideoTextDataset
from opensora_sp.encoders import planned_latent_size
from opensora_sp.models import PatchGrid
from opensora_sp.models.registry import resolve_config
from opensora_sp.parallel.cost import pair_flops


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
        self.rows = lru_cache(maxsize=None)(self._rows)

    def _rows(self, shape: ClipShape) -> tuple[int, int]:
        """T and S of a clip."""
        grid = PatchGrid(1, planned_latent_size(self.vae, *shape), self.model.patch_size)
        return grid.frames, grid.patches_per_frame

    def tokens(self, shape: ClipShape) -> int:
        frames, patches = self.rows(shape)
        return frames * patches

    def flops(self, shape: ClipShape, num_samples: int) -> float:
        """Forward work of a pair of blocks."""
        return pair_flops(num_samples, *self.rows(shape), self.model.hidden_size)
