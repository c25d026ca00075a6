"""The steps that a run with scheduled groups makes, as ``opensora-sp plan`` shows them.

Micro-batches, schedule and memory bounds are as in training: ``BucketPlan``'s order, or the run's
steps where its clips are there; ``data/schedule.py``; ``planner/bucket_levels.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from textwrap import wrap

import numpy as np

from opensora_sp.config import TrainConfig
from opensora_sp.data import Assigned, MicroBatch
from opensora_sp.data.bucket_plan import cut_into_steps
from opensora_sp.data.dataset import ClipShape
from opensora_sp.data.randomness import generator
from opensora_sp.data.schedule import busy_seconds, schedule
from opensora_sp.features.build import (
    GroupSeconds,
    Work,
    make_dataset,
    make_plan,
    micro_batches_of_step,
)
from opensora_sp.models.recompute import EVERYTHING
from opensora_sp.parallel.rank_groups import fixed_groups, group_sizes, nested_groups
from opensora_sp.planner.batches import CHOSEN_AT_START, batches_by_name
from opensora_sp.planner.bucket_levels import least_ranks
from opensora_sp.planner.run_estimator import RunEstimator

STEPS = 16  # at most, of a run whose clips are there
COLUMNS = 100


@dataclass(frozen=True)
class ScheduledSteps:
    """Steps of a run, with the groups that compute their micro-batches.

    Attributes:
        steps: micro-batches and their groups.
        seconds: predicted of a micro-batch in a group.
        sent: bytes that all ranks of a group send for a micro-batch.
        degrees: by bucket in the config's order, the numbers of ranks that its micro-batches run
            on, ascending.
        title: what these steps are.
    """

    steps: list[list[Assigned]]
    world_size: int
    seconds: GroupSeconds
    sent: Callable[[Assigned], float]
    degrees: dict[str, list[int]]
    title: str

    def describe(self) -> list[str]:
        """A line for each bucket and number of ranks, and the totals of a step."""
        lines = [*wrap(self.title, COLUMNS)]
        lines += ["        bucket  clips  ranks  micro-batches      s each    GB sent"]
        for bucket, sizes in self.degrees.items():
            lines += [self._row(bucket, ranks) for ranks in sizes]
        return lines + wrap(self._totals(), COLUMNS)

    def _row(self, bucket: str, ranks: int) -> str:
        row = [
            assigned
            for assigned in chain.from_iterable(self.steps)
            if (assigned.micro_batch.bucket, assigned.group.size) == (bucket, ranks)
        ]
        clips = max(len(assigned.micro_batch.ids) for assigned in row)
        seconds = np.mean([self.seconds(*assigned) for assigned in row])
        sent = np.mean(list(map(self.sent, row))) / 1e9
        return f"{bucket:>14} {clips:>6} {ranks:>6} {len(row):>14} {seconds:>11.3g} {sent:>10.3g}"

    def _totals(self) -> str:
        busy = [busy_seconds(step, self.world_size, self.seconds) for step in self.steps]
        longest = [seconds.max() for seconds in busy]
        idle = 1 - sum(seconds.mean() for seconds in busy) / sum(longest)
        sent = np.mean([sum(map(self.sent, step)) for step in self.steps])
        number = np.mean([len(step) for step in self.steps])
        return (
            f"A step of {number:.3g} micro-batches takes {np.mean(longest):.3g} s "
            f"({min(longest):.3g} to {max(longest):.3g} s), of which ranks wait {idle:.1%}, and "
            f"sends {sent / 1e9:.3g} GB, all ranks together. On top come the optimizer and its "
            "reduction of gradients."
        )


def schedule_steps(
    run: RunEstimator, progress: Callable[[list[str]], Iterable[str]] = iter
) -> ScheduledSteps | None:
    """Steps with all buckets, as a run makes them; None for a config whose steps are not scheduled,
    or that leaves out a batch size.

    Args:
        progress: iterates over the names of the buckets while memory is estimated.
    """
    cfg, world_size = run.cfg, run.num_gpus
    if not isinstance(cfg, TrainConfig) or not cfg.schedules_groups:
        return None
    batches = batches_by_name(cfg)
    if any(batch.batch_size == CHOSEN_AT_START for batch in batches.values()):
        return None

    family, least, limit = fixed_groups(world_size, run.ranks), {}, ""
    if not isinstance(cfg.sp_size, int):
        family = nested_groups(world_size, run.gpus_per_node)
        least = _least_ranks(run, progress(list(batches)), group_sizes(family))
        limit = f" and {run.memory / 1e9:.4g} GB of a GPU next to communicators"

    work = Work(cfg, options=run.options)
    per_node = min(run.gpus_per_node, world_size)
    seconds = GroupSeconds(cfg, work, ranks_per_node=per_node, least_ranks=least)
    per_step = micro_batches_of_step(cfg, {}, world_size)
    first = _first_steps(cfg, per_step)
    what = f"the first {len(first)} steps of this run"
    if not first:
        first = _all_buckets(cfg, work, per_step)
        what = f"{len(first)} steps with all buckets equally often (there are no clips)"

    steps = [schedule(step, family, seconds) for step in first]
    degrees: dict[str, list[int]] = {}
    for name in batches:
        sizes = {
            assigned.group.size
            for assigned in chain.from_iterable(steps)
            if assigned.micro_batch.bucket == name
        }
        if sizes:
            degrees[name] = sorted(sizes)
    title = f"{what}, scheduled by the speeds of {run.options.cost_model.name}{limit}:"
    return ScheduledSteps(steps, world_size, seconds, _sent_by(run, work), degrees, title)


def _least_ranks(run: RunEstimator, names: Iterable[str], sizes: list[int]) -> dict[str, int]:
    """By bucket, the fewest ranks that its batches fit on. Where they fit on none, the largest
    group: a run refuses to start, and its plan marks the excess.
    """
    batches, sp_size = batches_by_name(run.cfg), run.cfg.sp_size
    degrees = sp_size if isinstance(sp_size, dict) else {}
    least = {}
    for name in names:
        allowed = [degrees[name]] if name in degrees else sizes
        least[name] = least_ranks(run, batches[name], allowed) or max(allowed)
    return least


def _first_steps(cfg: TrainConfig, per_step: int) -> list[list[MicroBatch]]:
    """The first steps of the run; none where its clips are not there."""
    files = (cfg.dataset.path, cfg.dataset.manifest)
    if not any(file is not None and Path(file).exists() for file in files):
        return []
    plan = make_plan(cfg, make_dataset(cfg), per_step)
    number = max(1, min(STEPS, math.floor(plan.steps_per_epoch)))
    steps = [plan.step(step) for step in range(number)]
    if cfg.bucket_config is not None:
        return steps
    (name,) = batches_by_name(cfg)
    return [[micro_batch._replace(bucket=name) for micro_batch in step] for step in steps]


def _all_buckets(cfg: TrainConfig, work: Work, per_step: int) -> list[list[MicroBatch]]:
    """Whole steps in which all buckets are equally often, at 16:9, in the run's order."""
    batches = batches_by_name(cfg)
    repeats = per_step // math.gcd(per_step, len(batches))
    every = []
    for name, spec in batches.items():
        shape = ClipShape(spec.num_frames, *spec.image_size)
        ids, cost = tuple(range(spec.batch_size)), work.flops(shape, spec.batch_size)
        every += [MicroBatch(0, 0, shape, ids, cost, name)] * repeats

    rng = generator(cfg.seed, "plan")
    steps = cut_into_steps(every, rng, cfg.batch_order, per_step)
    return [
        [micro_batch._replace(number=number) for number, micro_batch in enumerate(step)]
        for step in steps
    ]


def _sent_by(run: RunEstimator, work: Work) -> Callable[[Assigned], float]:
    """Bytes that the ranks of a group send for a micro-batch, together."""
    level = 0 if run.checkpointing else EVERYTHING

    def sent(assigned: Assigned) -> float:
        if assigned.group.size == 1:
            return 0.0
        micro_batch = assigned.micro_batch
        shape = work.shape_of(micro_batch.shape, len(micro_batch.ids))
        return float(sum(run.traffic(shape, assigned.group.size, [level]).per_rank))

    return sent
