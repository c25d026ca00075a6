"""The mean step of a run whose micro-batches are scheduled on groups of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opensora_sp.config import TrainConfig
from opensora_sp.data import MicroBatch
from opensora_sp.data.bucket_plan import Batch, cut_into_steps
from opensora_sp.data.dataset import ClipShape
from opensora_sp.data.randomness import generator
from opensora_sp.data.schedule import busy_seconds, schedule
from opensora_sp.features.build import GroupSeconds, Work, micro_batches_of_step
from opensora_sp.models.recompute import EVERYTHING
from opensora_sp.parallel.rank_groups import fixed_groups, nested_groups
from opensora_sp.planner.batches import batches_by_name
from opensora_sp.planner.run_estimator import RunEstimator


@dataclass(frozen=True)
class MeanStep:
    """Seconds of a step, the share of them that ranks wait, and bytes that all ranks send."""

    seconds: float
    idle: float
    sent: float

    def describe(self) -> str:
        return (
            f"A step with all buckets equally often takes {self.seconds:.3g} s, of which ranks "
            f"wait {self.idle:.1%}, and sends {self.sent / 1e9:.3g} GB, all ranks together; "
            "without the optimizer."
        )


def mean_step(run: RunEstimator, least_ranks: Sequence[int]) -> MeanStep | None:
    """The mean of steps that are scheduled as in training; None for a config without a schedule.

    Args:
        least_ranks: of each bucket in the order of ``batches_by_name``, the fewest that its batches
            fit on.
    """
    cfg, world_size = run.cfg, run.num_gpus
    if not isinstance(cfg, TrainConfig) or not cfg.schedules_groups:
        return None

    family = fixed_groups(world_size, run.ranks)
    if not run.has_one_degree:
        family = nested_groups(world_size, run.gpus_per_node)
    work = Work(cfg, options=run.options)
    seconds = GroupSeconds(
        cfg,
        work,
        ranks_per_node=min(run.gpus_per_node, world_size),
        least_ranks=dict(zip(batches_by_name(cfg), least_ranks, strict=True)),
    )
    level = 0 if run.checkpointing else EVERYTHING

    busy, sent = [], 0
    for micro_batches in _sampled_steps(cfg, work, micro_batches_of_step(cfg, {}, world_size)):
        assigned = schedule(micro_batches, family, seconds)
        busy.append(busy_seconds(assigned, world_size, seconds))
        for micro_batch, group in assigned:
            shape = work.shape_of(micro_batch.shape, len(micro_batch.ids))
            sent += sum(run.traffic(shape, group.size, [level]).per_rank)
    longest = float(np.mean([ranks.max() for ranks in busy]))
    return MeanStep(longest, 1 - float(np.mean(busy)) / longest, sent / len(busy))


def _sampled_steps(cfg: TrainConfig, work: Work, per_step: int) -> list[list[MicroBatch]]:
    """Whole steps in which all buckets are equally often, at 16:9, in the run's order."""
    batches = batches_by_name(cfg)
    repeats = per_step // math.gcd(per_step, len(batches))
    every = []
    for name, spec in batches.items():
        shape = ClipShape(spec.num_frames, *spec.image_size)
        cost = work.flops(shape, spec.batch_size)
        every += [Batch(shape, tuple(range(spec.batch_size)), cost, name)] * repeats

    rng = generator(cfg.seed, "plan")
    steps = cut_into_steps(every, rng, cfg.batch_order, per_step)
    return [[MicroBatch(number, 0, *batch) for number, batch in enumerate(step)] for step in steps]
