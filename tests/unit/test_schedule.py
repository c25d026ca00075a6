"""Micro-batches of a step on groups of ranks: complete, deterministic, within bounds, balanced."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from opensora_sp.data.dataset import ClipShape
from opensora_sp.data.sampler import MicroBatch, MicroBatchPlan
from opensora_sp.data.schedule import Assigned, ScheduledBatches, busy_seconds, schedule
from opensora_sp.parallel.rank_groups import RankGroup, fixed_groups, groups_with, nested_groups

NODE = 8


def made(costs: np.ndarray) -> list[MicroBatch]:
    shape = ClipShape(1, 144, 256)
    return [MicroBatch(n, 0, shape, (n,), cost, "144p x 1") for n, cost in enumerate(costs)]


def seconds(one: MicroBatch, group: RankGroup) -> float:
    """A little is lost where ranks share, and more between nodes."""
    if group.size == 1:
        return one.cost
    return one.cost / group.size * (1.15 if group.size > NODE else 1.01) + 0.002


def drawn(count: int, seed: int) -> np.ndarray:
    """Costs as of a release's buckets: up to a factor of three apart, and some small remainders."""
    rng = np.random.default_rng(seed)
    costs = rng.choice([1.3, 1.6, 2.1, 2.4, 2.5, 2.6, 3.4], count)
    return np.where(rng.random(count) < 0.06, costs * rng.random(count), costs)


def length(assigned: list[Assigned], world_size: int) -> float:
    return float(busy_seconds(assigned, world_size, seconds).max())


def fixed_length(costs: np.ndarray, world_size: int, sp_size: int) -> float:
    """Of a step of one degree: the longest first, each where ranks are free first."""
    free = np.zeros(world_size // sp_size)
    for one in sorted(made(costs), key=lambda one: -one.cost):
        free[free.argmin()] += seconds(one, RankGroup(0, sp_size))
    return float(free.max())


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8, 24])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_each_micro_batch_comes_once_from_large_groups_to_small(
    world_size: int, count: int
) -> None:
    family, micro_batches = nested_groups(world_size, NODE), made(drawn(count, seed=count))
    assigned = schedule(micro_batches, family, seconds)

    assert sorted(one.micro_batch.number for one in assigned) == list(range(count))
    assert {one.group for one in assigned} <= set(family)
    assert assigned == schedule(micro_batches, family, seconds)
    for rank in range(world_size):
        own = [one for one in assigned if one.group in groups_with(rank, family)]
        for before, after in pairwise(own):
            assert after.group.is_inside(before.group)
            if after.group == before.group:
                assert after.micro_batch.number > before.micro_batch.number


def test_the_order_in_which_micro_batches_are_passed_decides_nothing_but_ties() -> None:
    family, micro_batches = nested_groups(8, NODE), made(np.arange(1.0, 12.0))
    groups = {one.micro_batch: one.group for one in schedule(micro_batches, family, seconds)}
    again = schedule(micro_batches[::-1], family, seconds)
    assert {one.micro_batch: one.group for one in again} == groups


@pytest.mark.parametrize("world_size", [3, 8, 24])
@pytest.mark.parametrize("seed", range(5))
def test_no_step_is_longer_than_one_of_a_fixed_degree(world_size: int, seed: int) -> None:
    costs = drawn(world_size * (1 + seed) // 2, seed)
    ours = length(schedule(made(costs), nested_groups(world_size, NODE), seconds), world_size)
    for sp_size in (1, 2, 4, 8):
        if world_size % sp_size == 0:
            assert ours <= fixed_length(costs, world_size, sp_size) * 1.005, sp_size


@pytest.mark.parametrize(("world_size", "steps"), [(8, 10), (64, 5)])
def test_ranks_end_together(world_size: int, steps: int) -> None:
    """Four micro-batches for each eight ranks; the slowest rank is at most 3 % over the mean."""
    over = []
    for seed in range(steps):
        micro_batches = made(drawn(world_size // 2, seed))
        assigned = schedule(micro_batches, nested_groups(world_size, NODE), seconds)
        busy = busy_seconds(assigned, world_size, seconds)
        over.append(busy.max() / busy.mean())
    assert np.mean(over) <= 1.03


def test_one_long_clip_takes_half_of_the_ranks_and_images_one_each() -> None:
    assigned = schedule(made(np.array([1.0, 1.0, 4.0, 1.0, 1.0])), nested_groups(8, 8), seconds)
    assert [one.group.size for one in assigned] == [4, 1, 1, 1, 1]
    assert assigned[0].micro_batch.number == 2


def least_ranks(ranks: int) -> Callable[[MicroBatch, RankGroup], float]:
    return lambda one, group: seconds(one, group) if group.size >= ranks else math.inf


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_groups_that_are_too_small_get_nothing(ranks: int) -> None:
    assigned = schedule(made(drawn(9, seed=1)), nested_groups(7, NODE), least_ranks(ranks))
    assert min(one.group.size for one in assigned) >= ranks


def test_a_micro_batch_that_fits_no_group_is_an_error_with_its_bucket() -> None:
    with pytest.raises(ValueError, match="1 clips of the bucket 144p x 1 .* up to 7 ranks.*lower"):
        schedule(made(np.ones(3)), nested_groups(7, NODE), least_ranks(8))


def test_with_a_fixed_degree_replicas_may_have_different_numbers() -> None:
    assigned = schedule(made(np.array([2.0, 1.0, 1.0])), fixed_groups(4, 2), seconds)
    assert [one.group for one in assigned] == [RankGroup(0, 2), RankGroup(2, 4), RankGroup(2, 4)]
    assert [one.micro_batch.number for one in assigned] == [0, 1, 2]


def test_a_step_of_a_thousand_micro_batches_is_scheduled_in_time() -> None:
    """It takes 0.2 s; seconds of the process, since tests share the cores."""
    micro_batches, start = made(drawn(1024, seed=0)), time.process_time()
    assigned = schedule(micro_batches, nested_groups(256, NODE), seconds)
    assert time.process_time() - start < 3
    busy = busy_seconds(assigned, 256, seconds)
    assert busy.max() / busy.mean() < 1.01


def test_a_ledger_has_each_clip_once_also_when_another_world_resumes() -> None:
    """Eight ranks take the first steps of an epoch, three take the others."""
    plan = MicroBatchPlan(
        num_samples=60, batch_size=2, micro_batches_per_step=5, seed=1, shape=ClipShape(1, 8, 8)
    )
    consumed: list[int] = []
    for world_size, steps in [(8, range(0, 4)), (3, range(4, 6))]:
        family = nested_groups(world_size, NODE)
        for rank in range(world_size):
            batches = ScheduledBatches(
                plan,
                start=steps.start,
                stop=steps.stop,
                rank=rank,
                family=family,
                seconds=seconds,
            )
            for request in batches:
                assert request.group is not None
                # The first rank of a group counts its clips.
                if rank == request.group.start:
                    consumed += request.micro_batch.ids
    assert sorted(consumed) == list(range(60))
