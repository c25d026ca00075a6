"""Training with mixed steps and a degree for each micro-batch: the same in every world."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mixed_clips import BUCKETS, TRAIN, write_mixed_set
from ranks import run_ranks
from runs import losses
from safetensors.torch import load_file
from world_runs import digests, train_in_worlds

from opensora_sp.training.metrics import read_metrics

STEPS = 5
PER_STEP = 4
# With "auto" alone, groups of CPUs would share little: their exchanges take long.
TWO = "sp_size={'144p x 3': 2, '256 x 3': 2}"
MIXED = ["batch_order=mixed", f"micro_batches_per_step={PER_STEP}", f"max_steps={STEPS}"]


def start(folder: Path) -> Path:
    manifest = write_mixed_set(folder)
    config = folder / "config.py"
    config.write_text(TRAIN.format(buckets=BUCKETS, manifest=str(manifest), steps=STEPS))
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks with degrees of 1 and 2 in each step, and one on a single rank."""
    folder = tmp_path_factory.mktemp("mixed")
    config = start(folder)
    runs: list[tuple[int, list[str], str | None]] = [
        (1, [*MIXED, "sp_size=1", f"outputs={folder / 'alone'}"], None),
        (2, [*MIXED, TWO, f"outputs={folder / 'auto2'}", "ckpt_every=2"], None),
    ]
    run_ranks(2, train_in_worlds, config, runs)
    return folder


def weights(run_dir: Path) -> torch.Tensor:
    tensors = load_file(run_dir / f"step_{STEPS:08d}" / "model" / "model.safetensors")
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def assert_same_training(run_dir: Path, alone: Path) -> None:
    """Losses and gradient norms of each step, and weights of the last, as of one process."""
    assert losses(run_dir) == pytest.approx(losses(alone), rel=2e-5)
    found, expected = (
        [line["grad_norm"] for line in read_metrics(one)] for one in (run_dir, alone)
    )
    assert found == pytest.approx(expected, rel=2e-4)
    # Adam moves each weight by about lr = 1e-3 in a step.
    assert (weights(run_dir) - weights(alone)).abs().max() < 2e-4


def test_a_degree_for_each_micro_batch_trains_as_one_process(folder: Path) -> None:
    alone = losses(folder / "alone")
    assert len(alone) == STEPS and len(set(alone)) == STEPS
    assert_same_training(folder / "auto2", folder / "alone")
    assert "processes in groups of 1, 2" in (folder / "auto2" / "train.log").read_text()


@pytest.fixture(scope="module")
def other_worlds(folder: Path) -> Path:
    """The same steps on three ranks, with degrees of some buckets, and resumed."""
    degrees = "sp_size={'144p x 3': 2, '256 x 1': 1}"
    from_two = str(folder / "auto2" / "step_00000002")
    runs: list[tuple[int, list[str], str | None]] = [
        (2, [*MIXED, TWO, f"outputs={folder / 'cut'}"], from_two),
        (3, [*MIXED, degrees, f"outputs={folder / 'map3'}"], None),
        (3, [*MIXED, "sp_size=auto", f"outputs={folder / 'moved'}"], from_two),
    ]
    run_ranks(3, train_in_worlds, folder / "config.py", runs)
    return folder


@pytest.mark.slow
def test_another_world_trains_the_same(other_worlds: Path) -> None:
    assert_same_training(other_worlds / "map3", other_worlds / "alone")


@pytest.mark.slow
def test_a_scheduled_run_resumes_to_the_last_bit(other_worlds: Path) -> None:
    assert losses(other_worlds / "cut") == losses(other_worlds / "auto2")[2:]
    resumed = digests(other_worlds / "cut", STEPS)
    assert resumed == digests(other_worlds / "auto2", STEPS) and len(resumed) == 3


@pytest.mark.slow
def test_another_world_resumes_the_same_micro_batches(other_worlds: Path) -> None:
    moved, alone = other_worlds / "moved", other_worlds / "alone"
    assert losses(moved) == pytest.approx(losses(alone)[2:], rel=2e-5)
    assert (weights(moved) - weights(alone)).abs().max() < 2e-4
