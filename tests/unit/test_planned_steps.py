"""The steps that ``opensora-sp plan`` shows of a run with a degree for each micro-batch: the run's
micro-batches, schedule and bounds, and the estimates of buckets on the ranks that they run on.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bucket_configs import FEW, write_bucket_config

from opensora_sp.cli import main, plan_steps
from opensora_sp.cli.plan_steps import ScheduledSteps, schedule_steps
from opensora_sp.config import TrainConfig, load_train_config
from opensora_sp.data.schedule import schedule
from opensora_sp.features.build import make_dataset, make_plan, micro_batches_of_step
from opensora_sp.parallel.rank_groups import nested_groups
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.run_plan import estimator_of, plan
from opensora_sp.planner.traffic import communicators, gpus_of_node


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_bucket_config(tmp_path, FEW, cost_model="H100", sp_size="auto")


def steps_of(cfg: TrainConfig, num_gpus: int = 8, **options: Any) -> ScheduledSteps:
    found = schedule_steps(estimator_of(cfg, num_gpus, **options))
    assert found is not None
    return found


def test_all_buckets_are_as_often_in_whole_steps_of_the_run_s_order(config: Path) -> None:
    mixed = steps_of(load_train_config(config, ["batch_order=mixed"]))
    by_cost = steps_of(load_train_config(config))
    for found in (mixed, by_cost):
        assert [len(step) for step in found.steps] == [8, 8, 8]  # one for each rank
        names = [one.micro_batch.bucket for step in found.steps for one in step]
        assert {names.count(name) for name in names} == {8}

    def buckets(found: ScheduledSteps) -> list[int]:
        return [len({one.micro_batch.bucket for one in step}) for step in found.steps]

    assert buckets(by_cost) == [1, 1, 1] and max(buckets(mixed)) > 1
    assert schedule_steps(estimator_of(load_train_config(config, ["sp_size=2"]), 8)) is None


def test_degrees_of_a_map_and_bounds_of_memory_are_kept(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = load_train_config(config, ["sp_size={'144p x 8': 4}"])
    assert steps_of(cfg).degrees["144p x 8"] == [4]

    asked: list[float] = []

    def least(run: RunEstimator, batch: object, sizes: list[int]) -> int:
        asked.append(run.memory)
        return sizes[-1]

    monkeypatch.setattr(plan_steps, "least_ranks", least)
    found = steps_of(load_train_config(config), memory_gb=40)
    assert set(map(tuple, found.degrees.values())) == {(8,)}
    # Less all communicators but the largest.
    assert set(asked) == {40e9 - sum(communicators(8, 8)[1:])}
    assert f"{asked[0] / 1e9:.4g} GB of a GPU next to communicators" in " ".join(found.describe())


def test_totals_are_those_of_the_steps(config: Path) -> None:
    found = steps_of(load_train_config(config, ["sp_size={'144p x 8': 4}"]))
    busy = []
    for step in found.steps:
        of_ranks = np.zeros(8)
        for one in step:
            of_ranks[one.group.start : one.group.stop] += found.seconds(*one)
        busy.append(of_ranks)
    longest = [one.max() for one in busy]
    idle = 1 - sum(one.sum() for one in busy) / 8 / sum(longest)

    text = " ".join(found.describe())
    assert f"takes {np.mean(longest):.3g} s" in text and f"ranks wait {idle:.1%}" in text
    # The bucket on four ranks alone sends: two switches a pair but one, forward and backward.
    shared = next(one for step in found.steps for one in step if one.group.size == 4)
    # Two of six clips are divided between two ranks, and half of their tokens change rank.
    moved = 2 * (8 * 9 * 16) / 2
    assert found.sent(shared) == 2 * 3 * moved * 48 * 2
    alone = next(one for step in found.steps for one in step if one.group.size == 1)
    assert found.sent(alone) == 0
    assert max(map(len, found.describe())) <= 100


def test_the_run_s_own_steps_are_shown_where_its_clips_are(config: Path) -> None:
    lines = ["path,text,num_frames,height,width"]
    lines += [f"{n}.mp4,a fox,{9 if n % 2 else 1},144,256" for n in range(200)]
    (config.parent / "clips.csv").write_text("\n".join(lines) + "\n")
    cfg = load_train_config(config, [f"dataset.manifest={config.parent / 'clips.csv'}"])
    found = steps_of(cfg)

    order = make_plan(cfg, make_dataset(cfg), 8)
    family = nested_groups(8, 8)
    assert len(found.steps) == min(16, math.floor(order.steps_per_epoch))
    for number, step in enumerate(found.steps):
        assert step == schedule(order.step(number), family, found.seconds)
    assert f"the first {len(found.steps)} steps of this run" in found.describe()[0]


def test_buckets_are_estimated_on_the_ranks_that_they_run_on(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = load_train_config(config, ["sp_size={'144p x 8': 4}"])
    ranks = {one.bucket.batch_size: one.ranks for one in plan(cfg, 8).buckets}
    assert ranks == {6: 4, 16: 1, 2: 1}
    both = plan(cfg, 8, degrees={"144p x 8": [2, 4], "144p x 1": [1], "240p x 8": [8]}).buckets
    assert [one.ranks for one in both] == [8, 2, 4, 1]

    main(["plan", str(config), "--gpus", "8", "--cfg-options", "sp_size={'144p x 8': 4}"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = [row for row in rows if row[:4] == ["6", "of", "8", "x"]]
    assert row[5:8] == ["6,912", "4", "switch"]


def test_micro_batches_of_a_rank_are_its_share_of_the_run_s_step(config: Path) -> None:
    """``accumulation_steps`` counts those of each replica, or with "auto" of each rank."""
    for options, wanted in [
        ([], {1: 1, 2: 2, 8: 8}),
        (["accumulation_steps=3"], {1: 3, 2: 6, 8: 24}),
        (["micro_batches_per_step=12"], {1: 2, 2: 3, 8: 12}),
        (["sp_size=2", "accumulation_steps=3"], {2: 3}),
    ]:
        cfg = load_train_config(config, options)
        run, of_step = RunEstimator(cfg, 8), micro_batches_of_step(cfg, {}, 8)
        assert wanted == {ranks: run.micro_batches_on(ranks) for ranks in wanted}
        for ranks, number in wanted.items():
            assert number == math.ceil(of_step / (8 // ranks))


def test_a_node_has_eight_gpus_where_nothing_else_is_known(config: Path) -> None:
    assert (gpus_of_node(64, None), gpus_of_node(4, None), gpus_of_node(64, 4)) == (8, 4, 4)
    cfg = load_train_config(config, ["sp_size=16"])
    assert RunEstimator(cfg, 16).spans_nodes(16)
    assert steps_of(load_train_config(config), 16).seconds.ranks_per_node == 8
    made = plan(load_train_config(config), 16)
    assert made.run.communicators == communicators(16, 8)
