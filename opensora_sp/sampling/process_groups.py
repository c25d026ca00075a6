"""How many ranks share a batch in sampling, and which SP group samples which batches.

The estimate is that of ``planner/micro_batch_time.py`` by the rates of ``parallel/cost_model.py``:
seconds of the busiest rank for one step of each batch. Encoding, decoding and writing cost the same
in all cases and are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from opensora_sp.config import InferenceConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.diffusion import predictions_per_step
from opensora_sp.dtypes import DTYPES
from opensora_sp.encoders import planned_latent_size
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import H100, CostModel
from opensora_sp.parallel.mesh import spans_nodes
from opensora_sp.planner.micro_batch_time import ModelCosts, seconds_of

from .requests import Request, batches_of

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

    videos, number = _count(len(requests), "video"), _count(len(batches), "group")
    processes = _count(world_size, "process", plural="es")
    what = f"{videos} on {processes}: {number} of {best} (sp_size {best})"
    return Groups(best, batches, f"{what}, {reason}")


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + plural * (number > 1)


def _schedule(
    batches: Sequence[Batch], groups: int, seconds: Callable[[Batch], float]
) -> tuple[float, list[list[Batch]]]:
    """Seconds of the busiest group, and the batches of each group.

    Greedy scheduling: the longest batch first, each to the group with the least work so far.
    """
    loads, schedule = [0.0] * groups, [list[Batch]() for _ in range(groups)]
    for batch in sorted(batches, key=seconds, reverse=True):
        group = loads.index(min(loads))
        loads[group] += seconds(batch)
        schedule[group].append(batch)
    return max(loads), schedule


def _seconds_by_shape(
    cfg: InferenceConfig, cost_model: CostModel, ranks: int, spans_nodes: bool
) -> Callable[[Batch], float]:
    """Predicts a forward pass of a batch on one of the groups of so many ranks."""
    spec = cfg.model_spec
    options = replace(cfg.parallel_options(cost_model), spans_nodes=spans_nodes)
    model = ModelCosts.of(spec.name, spec.config)
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
