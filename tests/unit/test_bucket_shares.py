"""Shares, degrees and idle times of buckets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from opensora_sp.data import ClipShape, MicroBatch, MicroBatchPlan, ReplicaBatches, ScheduledBatches
from opensora_sp.data.schedule import schedule
from opensora_sp.parallel.rank_groups import RankGroup, fixed_groups, nested_groups
from opensora_sp.training.metrics import describe_shares
from opensora_sp.training.step_log import BucketShares

SHAPE = ClipShape(1, 8, 8)
STEP = [
    MicroBatch(0, 0, SHAPE, (0,), 8.0, "720p x 51"),
    MicroBatch(1, 0, SHAPE, (1,), 2.0, "144p x 1"),
    MicroBatch(2, 0, SHAPE, (2,), 1.0, "144p x 1"),
]


class OneStep(MicroBatchPlan):
    def step(self, step: int) -> list[MicroBatch]:
        return STEP


PLAN = OneStep(num_samples=3, batch_size=1, micro_batches_per_step=3, seed=0, shape=SHAPE)


def mesh_of(family: tuple[RankGroup, ...]) -> Any:
    world_size = max(group.stop for group in family)
    return SimpleNamespace(family=family, world_size=world_size)


def scheduled(family: tuple[RankGroup, ...]) -> ScheduledBatches:
    def seconds(one: MicroBatch, group: RankGroup) -> float:
        return one.cost / group.size

    return ScheduledBatches(PLAN, start=0, stop=1, rank=0, family=family, seconds=seconds)


def test_numbers_of_a_scheduled_step() -> None:
    """On four ranks: 8 s of work of 11 are of one bucket."""
    family = nested_groups(4, 4)
    shares = BucketShares(mesh_of(family), scheduled(family))
    shares.see(0, STEP)
    numbers = shares.take()

    assert numbers["share/720p x 51"] == pytest.approx(8 / 11)
    assert numbers["share/144p x 1"] == pytest.approx(3 / 11)
    assert next(iter(numbers)) == "share/720p x 51"
    assert 1 <= numbers["degree/144p x 1"] <= numbers["degree/720p x 51"] <= 4
    assert sum(numbers[f"idle/{name}"] for name in ("720p x 51", "144p x 1")) < 0.1
    assert shares.take() == {}
    assert "720p x 51: 72.7% on" in describe_shares(numbers)


def test_without_buckets_a_scheduled_step_is_named_by_its_shape() -> None:
    family = nested_groups(4, 4)
    shares = BucketShares(mesh_of(family), scheduled(family))
    scheduled_step = [one._replace(bucket="") for one in STEP]
    shares.rank_batches.assigned = lambda step: schedule(  # type: ignore[method-assign]
        scheduled_step, family, lambda one, group: one.cost / group.size
    )
    shares.see(0, scheduled_step)
    assert shares.take()["share/1 x 8x8"] == 1.0


def test_replicas_wait_in_each_round() -> None:
    """Two replicas of two ranks: one with 8 s waits for nobody; then one has 1 s, and one none."""
    family = fixed_groups(4, 2)
    batches = ReplicaBatches(PLAN, start=0, stop=1, replica=0, num_replicas=2)
    shares = BucketShares(mesh_of(family), batches)
    shares.see(0, STEP)
    numbers = shares.take()

    # 2 x 6 s after the first round of 8 s; the replica without a micro-batch belongs to no bucket.
    assert numbers["idle/144p x 1"] == pytest.approx(2 * 6 / (4 * 9))
    assert numbers["idle/720p x 51"] == 0
    assert numbers["degree/144p x 1"] == 2
