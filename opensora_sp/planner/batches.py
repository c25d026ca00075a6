"""The batches that a config makes."""

from __future__ import annotations

from dataclasses import dataclass

from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.data import Buckets


@dataclass(frozen=True)
class BatchSpec:
    """Batches of ``batch_size`` clips of ``num_frames`` frames, ``image_size`` pixels each."""

    batch_size: int
    num_frames: int
    image_size: tuple[int, int]


def buckets_of(cfg: TrainConfig | InferenceConfig) -> list[BatchSpec]:
    """The shapes of batches that a config makes; of each bucket the one at 16:9."""
    if not isinstance(cfg, TrainConfig) or cfg.bucket_config is None:
        return [BatchSpec(cfg.batch_size, cfg.num_frames, cfg.size)]

    found = []
    for entry in Buckets.of(cfg.bucket_config).entries:
        if entry.batch_size:
            shape = entry.shape_at(9 / 16)
            size = shape.height, shape.width
            found.append(BatchSpec(entry.batch_size, shape.num_frames, size))
    return found
