"""The batches that a config makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.data import Buckets
from opensora_sp.data.buckets import with_batch_sizes

CHOSEN_AT_START = 0
"""The batch size of a bucket whose config leaves it out."""


@dataclass(frozen=True)
class BatchSpec:
    """Batches of ``batch_size`` clips of ``num_frames`` frames, ``image_size`` pixels each."""

    batch_size: int
    num_frames: int
    image_size: tuple[int, int]


def batches_by_name(cfg: TrainConfig | InferenceConfig) -> dict[str, BatchSpec]:
    """The batches that a config makes, by the name of their bucket; of each bucket at 16:9."""
    if not isinstance(cfg, TrainConfig) or cfg.bucket_config is None:
        name = f"{cfg.size[0]}x{cfg.size[1]} x {cfg.num_frames}"
        return {name: BatchSpec(cfg.batch_size, cfg.num_frames, cfg.size)}

    batches = {}
    for entry in Buckets.of(cfg.bucket_config).kept:
        shape = entry.shape_at(9 / 16)
        size = entry.batch_size or CHOSEN_AT_START
        batches[entry.name] = BatchSpec(size, shape.num_frames, (shape.height, shape.width))
    return batches


def with_batch_sizes_in(cfg: TrainConfig, sizes: Mapping[str, int]) -> TrainConfig:
    """The config with these batch sizes by the names of ``batches_by_name``; others stay."""
    if cfg.bucket_config is None:
        (size,) = sizes.values()
        return cfg.model_copy(update={"batch_size": size})
    bucket_config = with_batch_sizes(cfg.bucket_config, sizes)
    largest = Buckets.of(bucket_config).largest.batch_size
    return cfg.model_copy(update={"bucket_config": bucket_config, "batch_size": largest or 1})
