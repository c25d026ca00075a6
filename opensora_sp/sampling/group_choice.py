"""SP groups of a sampling run: their size and batches, and the placement of the encoders' weights.

``planner/seconds.py`` estimates by the rates of ``parallel/cost_model.py``:
seconds of the busiest rank for one step of each batch. Encoding, decoding and writing cost the same
in all cases and are ignored.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist

from opensora_sp.common.tensors import DTYPES
from opensora_sp.config import InferenceConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.diffusion.guidance import predictions_per_step
from opensora_sp.encoders import planned_latent_size
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import H100, CostModel
from opensora_sp.parallel.mesh import spans_nodes

from .requests import Request, batches_of

logger = logging.getLogger(__name__)
Batch = list[Request]


@dataclass(frozen=True)
class Groups:
    """``sp_size``, the batches of each SP group, and the reason for the choice, a sentence."""

    sp_size: int
    batches: list[list[Batch]]
    why: str


def choose_groups(
    cfg: InferenceConfig,
    requests: Sequence[Request],
    world_size: int,
    *,
    cost_model: CostModel = H100,
    ranks_per_node: int | None = None,
) -> Groups:
    """The config's ``sp_size``, or the one with the shortest estimated time (the smallest such).

    Args:
        cost_model: of the devices.
        ranks_per_node: None where all ranks are on one node.
    """
    seconds_by = functools.partial(_seconds_by_shape, cfg, cost_model)
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    if cfg.sp_size:
        sizes = [cfg.sp_size]

    schedules = {}
    for n in sizes:
        groups = world_size // n
        seconds = seconds_by(n, spans_nodes(world_size, n, ranks_per_node or world_size))
        schedules[n] = _schedule(batches_of(requests, cfg.batch_size, groups), groups, seconds)

    best = min(sizes, key=lambda n: schedules[n][0])
    batches = schedules[best][1]

    reason = "as asked for" if cfg.sp_size else "the shortest by estimate; --sp-size N overrides"

    videos, number = counted(len(requests), "video"), counted(len(batches), "group")
    processes = counted(world_size, "process", plural="es")
    what = f"{videos} on {processes}: {number} of {best} (sp_size {best})"
    return Groups(best, batches, f"{what}, {reason}")


def counted(number: int, noun: str, plural: str = "s") -> str:
    """``1 video``, ``3 videos``."""
    return f"{number} {noun}" + plural * (number > 1)


def _schedule(
    batches: Sequence[Batch], groups: int, seconds: Callable[[Batch], float]
) -> tuple[float, list[list[Batch]]]:
    """Seconds of the busiest group, and the batches of each group.

    Greedy scheduling: the longest batch first, each to the group with the least work so far.
    """
    loads, schedule = [0.0] * groups, [list[Batch]() for _ in range(groups)]
    # The longest first, so that the last ones fill the gaps.
    for batch in sorted(batches, key=seconds, reverse=True):
        group = loads.index(min(loads))
        loads[group] += seconds(batch)
        schedule[group].append(batch)
    return max(loads), schedule


def _seconds_by_shape(
    cfg: InferenceConfig, cost_model: CostModel, ranks: int, spans_nodes: bool
) -> Callable[[Batch], float]:
    """Predicts a forward pass of a batch on one of the groups of so many ranks."""
    # Once the config is checked, so that errors come without the time to import the planner.
    from opensora_sp.planner.seconds import ModelFlops, seconds_of

    spec = cfg.model_spec
    options = replace(cfg.parallel_options(cost_model), spans_nodes=spans_nodes)
    model = ModelFlops.planned(spec.name, spec.config)
    process = build_component(cfg.scheduler, SCHEDULERS)
    copies = predictions_per_step(process, by_frames=cfg.cond_type is not None)

    @functools.cache
    def seconds(size: tuple[int, int, int], count: int) -> float:
        latent_size = planned_latent_size(cfg.vae, *size)
        return seconds_of(
            BatchShape.of(spec.config, copies * count, latent_size),
            options,
            ranks,
            model=model,
            element_size=DTYPES[cfg.precision].itemsize,
            training=False,
        )

    return lambda batch: seconds(batch[0].shape, len(batch))


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
    # On GPUs alone.
    from opensora_sp.data.buckets import BatchSpec
    from opensora_sp.planner.run_estimator import RunEstimator
    from opensora_sp.planner.sampling_memory import FREE_SHARE, placed

    spec = BatchSpec(*largest_batch(groups))
    cfg = cfg.model_copy(update=dict(sp_size=groups.sp_size))
    run = RunEstimator(cfg, groups.sp_size, free)
    memory = run.memory_of(run.latents(spec), groups.sp_size)
    chosen, estimate = placed(run, spec, memory)

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


def largest_batch(groups: Groups) -> tuple[int, int, tuple[int, int]]:
    """The largest number of videos in a batch; frames and (height, width) of the largest shape."""
    batches = list(chain.from_iterable(groups.batches))
    num_frames, *size = max((batch[0].shape for batch in batches), key=math.prod)
    height, width = size
    return max(map(len, batches)), num_frames, (height, width)
