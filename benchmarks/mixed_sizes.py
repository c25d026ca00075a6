"""Waiting and predicted time of steps of mixed sizes: one degree per batch against fixed degrees.

python -m benchmarks mixed_sizes                   # the table of docs/mixed_sizes.md
python -m benchmarks mixed_sizes --ranks 64 --stages 3 --steps 5

Computed by the cost model of an H100, without one.

Clips: 100,000, of which 30 % are images; heights of 240, 360, 480, 720, 1080 and 2160 pixels for 5,
15, 15, 40, 20 and 5 %; three quarters at 16:9, a tenth each at 4:3 and 9:16, 5 % square; videos of
24 frames/s whose seconds are lognormal, with median 6 and sigma 0.7, cut to 1 to 60. Buckets are
those of Open-Sora 1.2, whose batches each fit one GPU of 80 GB. A step has a micro-batch for every
two ranks: four for each eight ranks, a node.

Every order has the same micro-batches. "wait" is by how much the slowest rank exceeds the mean of
all ranks. "efficiency" is the time that micro-batches would take on one rank each, without waiting
and exchanges, over that of all ranks. The reduction of gradients is left out.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from opensora_sp.config import TrainConfig, load_train_config
from opensora_sp.data.bucket_plan import BatchOrder, BucketPlan
from opensora_sp.data.sampler import MicroBatch, micro_batches_of
from opensora_sp.data.schedule import busy_seconds, schedule
from opensora_sp.features.build import GroupSeconds, Work
from opensora_sp.parallel.cost_model import H100
from opensora_sp.parallel.rank_groups import RankGroup, fixed_groups, nested_groups

CONFIG = Path(__file__).parents[1] / "configs" / "stdit3" / "train" / "buckets_stage1_sp8.py"
NODE = 8
DEGREES = (1, 2, 4, 8)
CLIPS = 100_000
MOST_WAITING = 1.03
ALONE = RankGroup(0, 1)

# configs/opensora-v1-2/train/stage2.py and stage3.py of hpcaitech/Open-Sora.
STAGE2 = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27), 204: ((1.0, 0.1), 13),
             408: ((1.0, 0.1), 6)},
    "256": {1: (0.4, 297), 51: (0.5, 20), 102: ((0.5, 0.33), 10), 204: ((0.5, 1.0), 5),
            408: ((0.5, 1.0), 2)},
    "240p": {1: (0.3, 297), 51: (0.4, 20), 102: ((0.4, 0.33), 10), 204: ((0.4, 1.0), 5),
             408: ((0.4, 1.0), 2)},
    "360p": {1: (0.5, 141), 51: (0.15, 8), 102: ((0.3, 0.5), 4), 204: ((0.3, 1.0), 2),
             408: ((0.5, 0.5), 1)},
    "512": {1: (0.4, 141), 51: (0.15, 8), 102: ((0.2, 0.4), 4), 204: ((0.2, 1.0), 2),
            408: ((0.4, 0.5), 1)},
    "480p": {1: (0.5, 89), 51: (0.2, 5), 102: (0.2, 2), 204: (0.1, 1)},
    "720p": {1: (0.1, 36), 51: (0.03, 1)},
    "1024": {1: (0.1, 36), 51: (0.02, 1)},
    "1080p": {1: (0.01, 5)},
    "2048": {1: (0.01, 5)},
}  # fmt: skip
STAGE3 = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: (1.0, 27), 204: (1.0, 13), 408: (1.0, 6)},
    "256": {1: (1.0, 297), 51: (0.5, 20), 102: (0.5, 10), 204: (0.5, 5), 408: ((0.5, 0.5), 2)},
    "240p": {1: (1.0, 297), 51: (0.5, 20), 102: (0.5, 10), 204: (0.5, 5), 408: ((0.5, 0.4), 2)},
    "360p": {1: (1.0, 141), 51: (0.5, 8), 102: (0.5, 4), 204: (0.5, 2), 408: ((0.5, 0.3), 1)},
    "512": {1: (1.0, 141), 51: (0.5, 8), 102: (0.5, 4), 204: (0.5, 2), 408: ((0.5, 0.2), 1)},
    "480p": {1: (1.0, 89), 51: (0.5, 5), 102: (0.5, 3), 204: ((0.5, 0.5), 1), 408: (0.0, None)},
    "720p": {1: (0.3, 36), 51: (0.2, 2), 102: (0.1, 1), 204: (0.0, None)},
    "1024": {1: (0.3, 36), 51: (0.1, 2), 102: (0.1, 1), 204: (0.0, None)},
    "1080p": {1: (0.1, 5)},
    "2048": {1: (0.05, 5)},
}  # fmt: skip


class Step(NamedTuple):
    """A step: its micro-batches, its seconds, and the seconds in which each rank computes."""

    micro_batches: list[MicroBatch]
    seconds: float
    busy: np.ndarray


class Row(NamedTuple):
    """Means over steps; ``waiting`` is the slowest rank's time over the mean of all ranks."""

    clips: float
    seconds: float
    waiting: float
    efficiency: float


class Sizes:
    """The sizes of the clips, as a ``Manifest`` has them."""

    file = "clips of the benchmark"

    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        heights = [240, 360, 480, 720, 1080, 2160]
        short = draws.choice(heights, CLIPS, p=[0.05, 0.15, 0.15, 0.4, 0.2, 0.05])
        ratio = draws.choice([9 / 16, 3 / 4, 1, 16 / 9], CLIPS, p=[0.75, 0.1, 0.05, 0.1])
        seconds = np.clip(draws.lognormal(np.log(6), 0.7, CLIPS), 1, 60)
        frames = np.where(draws.random(CLIPS) < 0.3, 1, np.round(24 * seconds))

        height = np.where(ratio > 1, np.round(short * ratio), short)
        self._columns = {
            "num_frames": frames.astype(float),
            "height": height.astype(float),
            "width": np.round(height / ratio),
        }

    def column(self, name: str) -> np.ndarray:
        return self._columns[name]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100, help="of each order, at most an epoch")


def run(args: argparse.Namespace) -> dict[str, Any]:
    cfg, clips = load_train_config(CONFIG, ["cost_model=H100"]), Sizes()
    assert cfg.bucket_config is not None
    stages = {1: cfg.bucket_config, 2: STAGE2, 3: STAGE3}

    figures: dict[str, Any] = {}
    for stage in args.stages:
        for ranks in args.ranks:
            case = Case(cfg, clips, stages[stage], ranks, args.steps)
            rows = dict(case.rows())
            figures[f"stage {stage}, {ranks} ranks"] = {
                name: one._asdict() for name, one in rows.items()
            }
            report(f"stage {stage}, {ranks} ranks", rows)
    return {"cases": figures, "kept": all(map(is_kept, figures.values()))}


def report(title: str, rows: dict[str, Row]) -> None:
    print(
        f"\n{title}\n{'order':28} {'clips/step':>10} {'s/step':>8} {'wait':>7} {'efficiency':>11}"
    )
    for name, one in rows.items():
        waiting = f"{one.waiting - 1:.1%}"
        print(
            f"{name:28} {one.clips:10,.0f} {one.seconds:8.3f} {waiting:>7} {one.efficiency:11.1%}",
            flush=True,
        )


def is_kept(rows: dict[str, dict[str, float]]) -> bool:
    """Whether ranks wait little, and no fixed degree is faster with the same steps."""
    ours = rows["mixed, a degree per batch"]
    fixed = [one["seconds"] for name, one in rows.items() if name.startswith("mixed, degree")]
    return ours["waiting"] <= MOST_WAITING and ours["seconds"] <= min(fixed) * 1.0001


class Case:
    """One bucket config on a number of ranks."""

    def __init__(
        self, cfg: TrainConfig, clips: Any, buckets: dict[str, Any], ranks: int, steps: int
    ) -> None:
        self.work = Work(cfg, options=cfg.parallel_options(H100))
        self.clips, self.buckets = clips, buckets
        self.ranks, self.num_steps = ranks, steps
        self.seconds = GroupSeconds(cfg, self.work, ranks_per_node=NODE)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """The table's rows by name."""
        mixed = list(self.steps("mixed", self.ranks // 2))
        ours = self.scheduled(mixed, nested_groups(self.ranks, NODE))
        yield "mixed, a degree per batch", self.row(ours)
        for degree in DEGREES:
            family = fixed_groups(self.ranks, degree)
            yield f"mixed, degree {degree}", self.row(self.scheduled(mixed, family))

        by_cost = list(self.steps("by_cost", self.ranks // 2))
        for degree in DEGREES:
            yield f"by_cost, degree {degree}", self.row(self.in_rounds(by_cost, degree))
        one_each = self.one_each(self.steps("mixed", self.ranks))
        yield "Open-Sora: one each, random", self.row(one_each)

    def row(self, steps: Iterable[Step]) -> Row:
        rows = []
        alone = total = 0.0
        for micro_batches, seconds, busy in steps:
            clips = sum(len(one.ids) for one in micro_batches)
            rows.append((clips, seconds, seconds / busy.mean()))
            alone += sum(self.seconds(one, ALONE) for one in micro_batches)
            total += seconds * self.ranks
        return Row(*np.mean(rows, axis=0).tolist(), alone / total)

    def steps(self, order: BatchOrder, per_step: int) -> Iterator[list[MicroBatch]]:
        """Whole steps, spread over the first epoch."""
        plan = BucketPlan(
            self.clips,
            self.buckets,
            frame_interval=1,
            micro_batches_per_step=per_step,
            seed=42,
            cost=self.work.flops,
            batch_order=order,
        )
        whole = [n for n, one in enumerate(plan.epoch(0).steps) if len(one) == per_step]
        for index in np.linspace(0, len(whole) - 1, min(self.num_steps, len(whole))):
            yield plan.step(whole[int(index)])

    def scheduled(
        self, steps: Iterable[list[MicroBatch]], family: tuple[RankGroup, ...]
    ) -> Iterator[Step]:
        for step in steps:
            busy = busy_seconds(schedule(step, family, self.seconds), self.ranks, self.seconds)
            yield Step(step, busy.max(), busy)

    def in_rounds(self, steps: Iterable[list[MicroBatch]], degree: int) -> Iterator[Step]:
        """Replicas reduce gradients after each round, and wait for the slowest one in it."""
        replicas, group = self.ranks // degree, RankGroup(0, degree)
        for step in steps:
            rounds = []
            for replica in range(replicas):
                own = micro_batches_of(step, replica, replicas)
                rounds.append([self.seconds(one, group) if one else 0.0 for one in own])
            busy = np.array(rounds)
            yield Step(step, busy.max(axis=0).sum(), busy.sum(axis=1))

    def one_each(self, steps: Iterable[list[MicroBatch]]) -> Iterator[Step]:
        """``VariableVideoBatchSampler``: random micro-batches of all buckets, one on each rank."""
        for step in steps:
            busy = np.array([self.seconds(one, ALONE) for one in step])
            yield Step(step, busy.max(), busy)
