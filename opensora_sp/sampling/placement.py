"""Which weights of encoders wait on the host, by the memory that is free when a run starts."""

from __future__ import annotations

import logging
import math

import torch
import torch.distributed as dist

from opensora_sp.config import InferenceConfig
from opensora_sp.planner.batches import BatchSpec
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.sampling_memory import FREE_SHARE

from .process_groups import Groups

logger = logging.getLogger(__name__)


def free_memory(device: torch.device) -> float:
    """Free bytes of the GPU with the fewest. Collective, since ranks have to choose alike."""
    free, _ = torch.cuda.mem_get_info(device)
    least = torch.tensor(free, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)


def place_encoders(cfg: InferenceConfig, groups: Groups, free: float) -> InferenceConfig:
    """The config with encoders whose peak fits into the free bytes, if any does; logs the choice.

    Settings of ``offload`` stay as they are.
    """
    spec = largest_batch(groups)
    cfg = cfg.model_copy(update=dict(sp_size=groups.sp_size))
    run = RunEstimator(cfg, groups.sp_size, free)
    memory = run.memory_of(run.latents(spec), groups.sp_size)
    chosen, estimate = run.sampling_memory(spec, memory)

    logger.info("memory, of %.3f GB free: %s", free / 1e9, estimate.describe())
    if estimate.peak > FREE_SHARE * free:
        logger.warning(
            "got %.3f GB of free GPU memory; expected %.3f GB for %d videos of %d frames, %dx%d; "
            "lower batch_size, num_frames or the resolution, or start more processes",
            free / 1e9,
            estimate.peak / FREE_SHARE / 1e9,
            spec.batch_size,
            spec.num_frames,
            *spec.image_size,
        )
    return chosen


def largest_batch(groups: Groups) -> BatchSpec:
    """As many videos as the largest batch has, of the largest shape."""
    batches = [batch for own in groups.batches for batch in own]
    num_frames, *size = max((batch[0].shape for batch in batches), key=math.prod)
    height, width = size
    return BatchSpec(max(map(len, batches)), num_frames, (height, width))
