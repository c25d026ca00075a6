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
    dealt = {sp_size: _deal(cfg, requests, sp_size, world_size // sp_size) for sp_size in sizes}
    best = min(sizes, key=lambda sp_size: (dealt[sp_size][0], sp_size))
    seconds, batches = dealt[best]

    counted = ((len(requests), "video", "s"), (world_size, "process", "es"))
    groups = f"{len(batches)} group{'s' * (len(batches) > 1)} of {best}"
    videos, processes = (f"{n} {word}" + plural * (n > 1) for n, word, plural in counted)
    what = f"{videos} on {processes}: {groups} (sp_size {best})"
    if cfg.sp_size:
        return Groups(best, batches, f"{what}, as asked for")

    others = [
        f"sp_size {n} would take {dealt[n][0] / (seconds or 1):.2f} times as long"
        for n in sizes
        if n != best
    ]
    if not others:
        return Groups(best, batches, f"{what}, the only way")
    reason = "; ".join(["by estimate", *others, "--sp-size N overrides"])
    return Groups(best, batches, f"{what}, {reason}")


def _deal(
    cfg: InferenceConfig, requests: Sequence[Request], sp_size: int, groups: int
) -> tuple[float, list[list[Batch]]]:
    """Time of the busiest group, in FLOPs, and the batches of each group.

    Greedy scheduling: the longest batch first, each to the group with the least work so far.
    """
    costs = _cost_by_shape(cfg, sp_size)
    batches = batches_of(requests, cfg.batch_size, groups)

    loads, dealt = [0.0] * groups, [list[Batch]() for _ in range(groups)]
    for batch in sorted(batches, key=costs, reverse=True):
        group = min(range(groups), key=loads.__getitem__)
        loads[group] += costs(batch)
        dealt[group].append(batch)

    return max(loads), dealt


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
