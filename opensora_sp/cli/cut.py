"""The steps that a run with scheduled groups makes, as ``opensora-sp plan`` shows them.

Micro-batches, schedule and memory bounds are those of training: ``BucketPlan``'s order, or the
run's own steps where its clips are there; ``data/schedule.py``; ``planner/least_ranks.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from textwrap import wrap

import numpy as np

from opensora_sp.config import TrainConfig
from opensora_sp.data import Assigned, MicroBatch, busy_seconds
from opensora_sp.data.bucket_plan import Batch, cut_into_steps
from opensora_sp.data.dataset import ClipShape
from opensora_sp.data.schedule import schedule
from opensora_sp.dtypes import DTYPES
from opensora_sp.features.build import Work, make_dataset, make_plan, micro_batches_of_step
from opensora_sp.features.group_seconds import GroupSeconds
from opensora_sp.parallel import check_sp_size
from opensora_sp.parallel.cost_model import GPUS, CostModel
from opensora_sp.planner.batches import CHOSEN_AT_START, BatchSpec, batches_by_name
from opensora_sp.planner.communicators import communicators, gpus_of_node
from opensora_sp.planner.least_ranks import least_ranks
from opensora_sp.planner.run_estimator import DEFAULT_MEMORY, RunEstimator
from opensora_sp.planner.traffic import traffic
from opensora_sp.randomness import generator
from opensora_sp.rank_groups import fixed_groups, group_sizes, nested_groups
from opensora_sp.runtime.cost_model_file import cost_model_of

STEPS = 16  # at most, of a run whose clips are there
COLUMNS = 100

Names = Callable[[list[str]], Iterable[str]]


@dataclass(frozen=True)
class ScheduledSteps:
    """Steps of a run, with the groups that compute their micro-batches.

    Attributes:
        steps: micro-batches and their groups.
        buckets: their names, in the order of the config.
        seconds: predicted of a micro-batch in a group.
        sent: bytes that all ranks of a group send for a micro-batch.
        of_run: whether these are the first steps of the run itself.
        memory: bytes of a device, by which groups were excluded; None where none were.
    """

    steps: list[list[Assigned]]
    buckets: list[str]
    world_size: int
    seconds: GroupSeconds
    sent: Callable[[Assigned], float]
    rates: CostModel
    of_run: bool
    memory: float | None

    @cached_property
    def degrees(self) -> dict[str, list[int]]:
        """By bucket, the numbers of ranks that its micro-batches run on, ascending."""
        found: dict[str, set[int]] = {name: set() for name in self.buckets}
        for one, group in self._all():
            found[one.bucket].add(group.size)
        return {bucket: sorted(sizes) for bucket, sizes in found.items() if sizes}

    def describe(self) -> list[str]:
        """A table of the buckets, and the totals of a step."""
        what = f"the first {len(self.steps)} steps of this run"
        if not self.of_run:
            what = f"{len(self.steps)} steps with all buckets equally often (there are no clips)"
        memory = "" if self.memory is None else f" and {self.memory / 1e9:.4g} GB of a GPU"
        title = f"{what}, scheduled by the speeds of {self.rates.name}{memory}:"
        head = "        bucket  clips  ranks  micro-batches      s each    GB sent"
        rows = chain.from_iterable(map(self._of_bucket, self.degrees))
        return [*wrap(title, COLUMNS), head, *rows, *wrap(self._totals(), COLUMNS)]

    def _of_bucket(self, bucket: str) -> list[str]:
        """A line for each number of ranks on which the bucket's micro-batches run."""
        lines = []
        for size in self.degrees[bucket]:
            own = [one for one in self._all() if one.micro_batch.bucket == bucket]
            own = [one for one in own if one.group.size == size]
            clips = max(len(one.micro_batch.ids) for one in own)
            seconds = sum(self.seconds(*one) for one in own) / len(own)
            sent = sum(map(self.sent, own)) / len(own) / 1e9
            row = f"{clips:>6} {size:>6} {len(own):>14} {seconds:>11.3g} {sent:>10.3g}"
            lines.append(f"{bucket:>14} {row}")
        return lines

    def _totals(self) -> str:
        longest, computed, sent = [], [], []
        for step in self.steps:
            busy = busy_seconds(step, self.world_size, self.seconds)
            longest.append(busy.max())
            computed.append(busy.mean())
            sent.append(sum(map(self.sent, step)))
        idle = 1 - sum(computed) / sum(longest)
        number = sum(map(len, self.steps)) / len(self.steps)
        return (
            f"A step of {number:.3g} micro-batches takes {np.mean(longest):.3g} s "
            f"({min(longest):.3g} to {max(longest):.3g} s), of which ranks wait {idle:.1%}, and "
            f"sends {np.mean(sent) / 1e9:.3g} GB, all ranks together. On top come the optimizer "
            "and its reduction of gradients."
        )

    def _all(self) -> list[Assigned]:
        return [one for step in self.steps for one in step]


def schedule_steps(
    cfg: TrainConfig,
    world_size: int,
    ranks_per_node: int | None,
    *,
    gpu: str | None = None,
    memory_gb: float | None = None,
    progress: Names = iter,
) -> ScheduledSteps | None:
    """Steps with all buckets, as a run makes them; None for a config whose steps are not scheduled,
    or that leaves out a batch size.

    Args:
        ranks_per_node: as ``plan`` takes it.
        gpu: a name in ``GPUS``, unless the config has a cost model; an H100 otherwise.
        memory_gb: of one GPU; that of ``gpu``, or 80 GB, if it is left out.
        progress: iterates over the names of the buckets while memory is estimated.

    Raises:
        ValueError: if ``sp_size`` does not fit the number of ranks.
    """
    batches = batches_by_name(cfg)
    is_chosen_later = any(one.batch_size == CHOSEN_AT_START for one in batches.values())
    if not cfg.schedules_groups or is_chosen_later:
        return None

    rates = cost_model_of(cfg.cost_model, default=GPUS[gpu or "H100"])
    per_node = gpus_of_node(world_size, ranks_per_node)
    work = Work(cfg, options=cfg.parallel_options(rates))
    memory, bounds = None, {}
    if isinstance(cfg.sp_size, int):
        check_sp_size(cfg.sp_size, world_size)
        family = fixed_groups(world_size, cfg.sp_size)
    else:
        family = nested_groups(world_size, per_node)
        of_gpu = DEFAULT_MEMORY if gpu is None else GPUS[gpu].memory
        memory = of_gpu if memory_gb is None else memory_gb * 1e9
        left = memory - communicators(world_size, per_node).beside_largest
        run = RunEstimator(cfg, world_size, left / 1e9, "cuda", None, per_node)
        run.plan_kernels()
        bounds = _least_ranks(run, progress(list(batches)), left, group_sizes(family))

    seconds = GroupSeconds(cfg, work, ranks_per_node=min(per_node, world_size), least_ranks=bounds)
    per_step = micro_batches_of_step(cfg, {}, world_size)
    own = _own_steps(cfg, per_step)
    steps = own or _all_buckets(cfg, work, batches, per_step)
    return ScheduledSteps(
        [schedule(step, family, seconds) for step in steps],
        list(batches),
        world_size,
        seconds,
        _sent_by(cfg, work, per_node),
        rates,
        of_run=own is not None,
        memory=memory,
    )


def _least_ranks(
    run: RunEstimator, names: Iterable[str], memory: float, sizes: Sequence[int]
) -> dict[str, int]:
    """By bucket, the fewest ranks that its batches fit on. Where they fit on none, the largest
    group: a run refuses to start, and its plan marks what is too much.
    """
    batches, sp_size = batches_by_name(run.cfg), run.cfg.sp_size
    degrees = sp_size if isinstance(sp_size, dict) else {}
    found = {}
    for name in names:
        allowed = [degrees[name]] if name in degrees else sizes
        found[name] = least_ranks(run, batches[name], memory, allowed) or max(allowed)
    return found


def _own_steps(cfg: TrainConfig, per_step: int) -> list[list[MicroBatch]] | None:
    """The first steps of the run; None where its clips are not there."""
    files = (cfg.dataset.path, cfg.dataset.manifest)
    if not any(file is not None and Path(file).exists() for file in files):
        return None
    plan = make_plan(cfg, make_dataset(cfg), per_step)
    number = max(1, min(STEPS, math.floor(plan.steps_per_epoch)))
    steps = [plan.step(step) for step in range(number)]
    if cfg.bucket_config is not None:
        return steps
    (name,) = batches_by_name(cfg)
    return [[one._replace(bucket=name) for one in step] for step in steps]


def _all_buckets(
    cfg: TrainConfig, work: Work, batches: dict[str, BatchSpec], per_step: int
) -> list[list[MicroBatch]]:
    """Whole steps in which all buckets are equally often, at 16:9, in the run's order."""
    repeats = per_step // math.gcd(per_step, len(batches))
    every = []
    for name, spec in batches.items():
        shape = ClipShape(spec.num_frames, *spec.image_size)
        ids, cost = tuple(range(spec.batch_size)), work.flops(shape, spec.batch_size)
        every += [Batch(shape, ids, cost, name)] * repeats

    rng = generator(cfg.seed, "plan")
    steps = cut_into_steps(every, rng, cfg.batch_order, per_step)
    return [
        [MicroBatch(n, 0, one.shape, one.ids, one.cost, one.bucket) for n, one in enumerate(step)]
        for step in steps
    ]


def _sent_by(cfg: TrainConfig, work: Work, per_node: int) -> Callable[[Assigned], float]:
    """Bytes that the ranks of a group send for a micro-batch, together."""

    @cache
    def sent(shape: ClipShape, num_samples: int, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        of_ranks = traffic(
            work.shape_of(shape, num_samples),
            work.options_on(ranks > per_node),
            ranks,
            element_size=DTYPES[cfg.precision].itemsize,
            checkpointing=bool(cfg.grad_checkpoint),
            training=True,
        )
        return float(sum(of_ranks.per_rank))

    def of_assigned(one: Assigned) -> float:
        return sent(one.micro_batch.shape, len(one.micro_batch.ids), one.group.size)

    return of_assigned
