"""How many ranks share a batch in sampling, and which SP group samples which batches.

The estimate is that of ``planner`` and ``parallel/cost_model.py``: the busiest rank's FLOPs and
communication for one step of each batch. Encoding, decoding and writing cost the same in all cases
and are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opensora_sp.config import InferenceConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.encoders import planned_latent_size
from opensora_sp.parallel import Options
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.planner.sharing import busiest_work
from opensora_sp.planner.traffic import traffic

from .requests import Request, batches_of

Batch = list[Request]


@dataclass(frozen=True)
class Groups:
    """``sp_size``, the batches of each SP group, and the reason for the choice, a sentence."""

    sp_size: int
    batches: list[list[Batch]]
    why: str


def choose_groups(cfg: InferenceConfig, requests: Sequence[Request], world_size: int) -> Groups:
    """The config's ``sp_size``, or the one with the shortest estimated time (the smallest such)."""
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    if cfg.sp_size:
        sizes = [cfg.sp_size]
    schedules = {n: _schedule(cfg, requests, n, world_size // n) for n in sizes}
    best = min(sizes, key=lambda n: schedules[n][0])
    time, batches = schedules[best]

    reason = "the only way"
    if cfg.sp_size:
        reason = "as asked for"
    elif len(sizes) > 1:
        reason = "by estimate"
        for n in sizes:
            if n != best:
                ratio = schedules[n][0] / (time or 1)
                reason += f"; sp_size {n} would take {ratio:.2f} times as long"
        reason += "; --sp-size N overrides"

    videos, groups = _count(len(requests), "video"), _count(len(batches), "group")
    processes = _count(world_size, "process", plural="es")
    what = f"{videos} on {processes}: {groups} of {best} (sp_size {best})"
    return Groups(best, batches, f"{what}, {reason}")


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + plural * (number > 1)


def _schedule(
    cfg: InferenceConfig, requests: Sequence[Request], sp_size: int, groups: int
) -> tuple[float, list[list[Batch]]]:
    """Time of the busiest group, in FLOPs, and the batches of each group.

    Greedy scheduling: the longest batch first, each to the group with the least work so far.
    """
    cost = _cost_by_shape(cfg, sp_size)
    batches = batches_of(requests, cfg.batch_size, groups)

    loads, schedule = [0.0] * groups, [list[Batch]() for _ in range(groups)]
    for batch in sorted(batches, key=cost, reverse=True):
        group = loads.index(min(loads))
        loads[group] += cost(batch)
        schedule[group].append(batch)
    return max(loads), schedule


def _cost_by_shape(cfg: InferenceConfig, ranks: int) -> Callable[[Batch], float]:
    model, how = cfg.model_spec.config, Options(**dict(cfg.sequence_parallel))
    doubled = 1 if build_component(cfg.scheduler, SCHEDULERS).cfg_scale == 1 else 2

    @functools.cache
    def cost(size: tuple[int, int, int], count: int) -> float:
        shape = BatchShape.of(model, doubled * count, planned_latent_size(cfg.vae, *size))
        sent = traffic(shape, how, ranks, element_size=1, checkpointing=False, training=False)
        communication = max(sent.forward) * how.cost_model.flops_per_element
        return busiest_work(shape, how, ranks) + communication

    return lambda batch: cost(batch[0].shape, len(batch))
