"""Runs with ``loss_weight="micro_batch"``: the same in every world, and not the mean of samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixed_clips import BUCKETS, TRAIN, write_mixed_set
from ranks import run_ranks
from runs import losses
from world_runs import train_in_worlds

from opensora_sp.common.files import read_json
from opensora_sp.training.metrics import read_metrics

STEPS = 3


@pytest.mark.slow
def test_every_micro_batch_has_the_same_weight_in_every_world(tmp_path: Path) -> None:
    manifest = write_mixed_set(tmp_path)
    config = tmp_path / "config.py"
    config.write_text(TRAIN.format(buckets=BUCKETS, manifest=str(manifest), steps=STEPS))
    mixed = ["batch_order=mixed", "micro_batches_per_step=4"]
    weight = "loss_weight=micro_batch"
    runs = {
        "alone": (1, [*mixed, weight, "sp_size=1"]),
        "auto": (2, [*mixed, weight, "sp_size=auto"]),
        "samples": (1, [*mixed, "sp_size=1"]),
        # Three micro-batches on two replicas: one of them runs one of zeros.
        "by_cost_alone": (1, [weight, "sp_size=1"]),
        "by_cost": (2, [weight, "sp_size=1"]),
    }
    run_ranks(
        2,
        train_in_worlds,
        config,
        [
            (world, [*how, f"outputs={tmp_path / name}"], None)
            for name, (world, how) in runs.items()
        ],
    )

    for name, alone in [("auto", "alone"), ("by_cost", "by_cost_alone")]:
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / alone), rel=2e-5)
        found, expected = (
            [line["grad_norm"] for line in read_metrics(tmp_path / one)] for one in (name, alone)
        )
        assert found == pytest.approx(expected, rel=2e-4)
    # A control: micro-batches of a step differ in size.
    weighted, of_samples = losses(tmp_path / "alone"), losses(tmp_path / "samples")
    assert weighted != pytest.approx(of_samples, rel=1e-3)

    state = read_json(tmp_path / "auto" / f"step_{STEPS:08d}" / "state.json")
    assert state["loss_weight"] == "micro_batch"
