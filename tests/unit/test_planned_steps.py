"""The mean step that ``opensora-sp plan`` shows of scheduled micro-batches, and the numbers of
micro-batches and GPUs that plans count with.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bucket_configs import FEW, write_bucket_config

from opensora_sp.cli import main
from opensora_sp.cli.mean_step import mean_step
from opensora_sp.config import load_train_config
from opensora_sp.features.build import micro_batches_of_step
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.run_plan import estimator_of, plan
from opensora_sp.planner.traffic import communicators, gpus_of_node


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_bucket_config(tmp_path, FEW, cost_model="H100", sp_size="auto")


def test_the_mean_step_of_fixed_degrees_by_hand(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps of eight micro-batches, in which each bucket is eight times."""
    options = ["sp_size={'144p x 8': 4}", "batch_order=mixed"]
    made = plan(load_train_config(config, options), 8)
    ranks = {estimate.bucket.batch_size: estimate.ranks for estimate in made.buckets}
    assert ranks == {6: 4, 16: 1, 2: 1}
    step = mean_step(made.run, list(ranks.values()))
    assert step is not None

    # Two of six clips are divided between two ranks, and half of their tokens change rank.
    moved = 2 * (8 * 9 * 16) / 2
    assert step.sent == pytest.approx(8 / 3 * 2 * 3 * moved * 48 * 2)
    # No rank is busy for longer than the step, and all together not less than their work.
    work = 8 / 3 * sum(estimate.seconds * estimate.ranks for estimate in made.buckets)
    assert step.seconds * (1 - step.idle) * 8 == pytest.approx(work, rel=1e-6)
    assert 0 <= step.idle < 1

    main(["plan", str(config), "--gpus", "8", "--cfg-options", *options])
    text = " ".join(capsys.readouterr().out.split())
    assert f"takes {step.seconds:.3g} s, of which ranks wait {step.idle:.1%}" in text


def test_a_run_of_one_degree_has_no_mean_step(config: Path) -> None:
    run = estimator_of(load_train_config(config, ["sp_size=2"]), 8)
    assert mean_step(run, [2, 2, 2]) is None


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
    made = plan(load_train_config(config), 16)
    assert made.run.communicators == communicators(16, 8)
