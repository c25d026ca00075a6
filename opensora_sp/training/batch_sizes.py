"""Batch sizes of buckets that a config leaves out (None): chosen when a run starts, and kept.

A checkpoint has the whole config with the sizes that were chosen. A run that resumes takes them
from there, so its micro-batches are the same on devices with more or less memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.checkpoint import on_rank_0
from opensora_sp.common.files import read_json
from opensora_sp.config import TrainConfig
from opensora_sp.data import CachedFeatures
from opensora_sp.data.buckets import Buckets, batch_sizes_of
from opensora_sp.features.build import (
    TrainingSet,
    largest_batch,
    make_plan,
    micro_batches_of_step,
    with_length,
)
from opensora_sp.features.cached import check_clips
from opensora_sp.parallel import SequenceMesh
from opensora_sp.planner.batches import with_batch_sizes_in
from opensora_sp.planner.fit import Fit, fit
from opensora_sp.runtime.cost_model_file import cost_model_of
from opensora_sp.runtime.host_checks import check_shared_memory

from .activations import free_memory

logger = logging.getLogger(__name__)


def is_left_out(cfg: TrainConfig) -> bool:
    """Whether any bucket has no batch size yet."""
    config = cfg.bucket_config
    return config is not None and bool(Buckets.of(config).without_batch_size)


def provisional(cfg: TrainConfig, checkpoint: Path | None) -> TrainConfig:
    """The config for checks before a process group exists: with recorded batch sizes, or one clip
    to a batch.
    """
    cfg = recorded(cfg, checkpoint)
    if not is_left_out(cfg):
        return cfg
    assert cfg.bucket_config is not None
    names = Buckets.of(cfg.bucket_config).without_batch_size
    return with_batch_sizes_in(cfg, dict.fromkeys(names, 1))


def recorded(cfg: TrainConfig, checkpoint: Path | None) -> TrainConfig:
    """The config with the batch sizes that a checkpoint's run has chosen.

    Raises:
        ValueError: if the checkpoint has none for a bucket.
    """
    if checkpoint is None or not is_left_out(cfg):
        return cfg
    assert cfg.bucket_config is not None
    config: Mapping[str, Any] = read_json(checkpoint / "state.json").get("config", {})

    known = batch_sizes_of(config.get("bucket_config") or {})
    names = Buckets.of(cfg.bucket_config).without_batch_size
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"got bucket_config without the batch size of {', '.join(unknown)}, which {checkpoint} "
            "lacks as well; expected the buckets of the run that is resumed; change them back, or "
            f"start a new run from these weights with --cfg-options load={checkpoint}"
        )
    return with_batch_sizes_in(cfg, {name: known[name] for name in names})


def with_chosen_batch_sizes(
    cfg: TrainConfig,
    dataset: TrainingSet,
    checkpoint: Path | None,
    mesh: SequenceMesh,
    device: torch.device,
    reserved: int,
) -> TrainConfig:
    """The config with a batch size for every bucket, the same on all ranks. Collective.

    They are those of the checkpoint, or else chosen by ``planner.fit`` for the smallest memory over
    ranks, on rank 0.

    Args:
        reserved: bytes of the device that encoders take.

    Raises:
        ValueError: on all ranks, if not one clip of a bucket fits.
    """
    if not is_left_out(cfg):
        return cfg
    if checkpoint is not None:
        known = recorded(cfg, checkpoint)
        logger.info("batch sizes of the run are kept, as recorded in %s", checkpoint)
        return known

    memory = free_memory(device, reserved)
    chosen: list[dict[str, int]] = [{}]
    with on_rank_0("choosing batch sizes") as is_rank_0:
        if is_rank_0:
            fitted = _fit(cfg, memory, mesh, device)
            chosen = [fitted.sizes]
            _log(fitted)
    dist.broadcast_object_list(chosen, src=0)

    cfg = with_batch_sizes_in(cfg, chosen[0])
    _check(cfg, dataset)
    return cfg


def _fit(cfg: TrainConfig, memory: float, mesh: SequenceMesh, device: torch.device) -> Fit:
    assert cfg.bucket_config is not None
    return fit(
        cfg,
        mesh.world_size,
        memory,
        names=Buckets.of(cfg.bucket_config).without_batch_size,
        gpus_per_node=mesh.ranks_per_node,
        device=device.type,
        cost_model=cost_model_of(cfg.cost_model),
    )


def _log(fitted: Fit) -> None:
    logger.info(
        "batch sizes chosen for %.1f GB, the smallest memory of a device beside the encoders, and "
        "micro-batches of about %.3g s; checkpoints keep them:",
        fitted.memory / 1e9,
        fitted.seconds,
    )
    for one in fitted.batches:
        logger.info(
            "%14s %6d clips, %.3g s, decided by %s",
            one.name,
            one.batch.batch_size,
            one.seconds,
            one.decided_by,
        )


def _check(cfg: TrainConfig, dataset: TrainingSet) -> None:
    """The checks of ``preflight`` that depend on batch sizes."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_shared_memory(largest_batch(cfg), cfg.num_workers, local_world_size)
    if isinstance(dataset, CachedFeatures):
        plan = make_plan(cfg, dataset, micro_batches_of_step(cfg, {}, dist.get_world_size()))
        check_clips(with_length(cfg, plan), dataset, plan)
