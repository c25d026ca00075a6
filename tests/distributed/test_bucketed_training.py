"""Training on mixed buckets: any (dp, sp), resume in the middle of an epoch, corrupt samples."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from mixed_clips import BUCKETS, TRAIN, write_mixed_set
from ranks import run_ranks
from runs import losses
from world_runs import digests, train_in_worlds

from opensora_sp.config import load_train_config
from opensora_sp.planner.fit import fit
from opensora_sp.planner.memory import memory_for
from opensora_sp.training.metrics import read_metrics
from opensora_sp.training.preflight import preflight

STEPS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two replicas: all steps, and those after the second resumed."""
    folder = tmp_path_factory.mktemp("mixed")
    manifest = write_mixed_set(folder)
    config = folder / "config.py"
    config.write_text(TRAIN.format(buckets=BUCKETS, manifest=str(manifest), steps=STEPS))
    whole = ["sp_size=1", f"outputs={folder / '2x1'}", "ckpt_every=2"]
    cut = ["sp_size=1", f"outputs={folder / 'cut'}"]
    runs = [(2, whole, None), (2, cut, str(folder / "2x1" / "step_00000002"))]
    run_ranks(2, train_in_worlds, config, runs)
    return folder


def test_resume_in_the_middle_of_an_epoch_is_exact(folder: Path) -> None:
    """From between two steps of micro-batches of other buckets, to the last bit."""
    log = (folder / "2x1" / "train.log").read_text()
    found = re.search(r"epoch 0: \d+ of 24 clips in (\d+) steps of up to 3 micro-batches", log)
    # Step 2 is inside the epoch, and the run continues into the next.
    assert found and 2 < int(found[1]) < STEPS
    assert losses(folder / "cut") == losses(folder / "2x1")[2:]
    resumed = digests(folder / "cut", STEPS)
    assert resumed == digests(folder / "2x1", STEPS) and len(resumed) == 3


def test_a_run_logs_its_buckets_data_wait_and_corrupt_samples(folder: Path) -> None:
    log = (folder / "2x1" / "train.log").read_text()
    assert "144p x 3" in log and "256 x 1" in log
    summary = json.loads((folder / "2x1" / "summary.json").read_text())
    broken = {Path(path).name for path in summary["broken_clips"]}
    assert broken and broken <= {"3.png", "13.mp4"}
    for path in broken:
        assert log.count(f"{path} (") == 1

    lines = read_metrics(folder / "2x1")
    assert all(0 < line["data_wait"] < 1 for line in lines)
    assert lines[-1]["replaced_clips"] >= len(broken)
    assert set(summary["files_read"]) == {".mp4", ".png"}
    assert "data forward" not in summary["elements_sent"]


def train_with_memory(config: Path, memory: float, options: list[str], resume: str | None) -> None:
    """A run on devices of so many bytes; on rank 1 of more."""
    from opensora_sp.training import memory_fit

    memory_of, rank = memory_fit.memory_of, dist.get_rank()
    memory_fit.memory_of = lambda device: memory * (1 + rank)
    try:
        train_in_worlds(config, [(2, options, resume)])
    finally:
        memory_fit.memory_of = memory_of


@pytest.mark.slow
def test_batch_sizes_are_chosen_for_the_smallest_device_and_kept(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    left_out = {"144p": {1: (1.0, None), 3: (1.0, 2)}, "256": {1: (0.5, None)}}
    manifest = str(write_mixed_set(tmp_path))
    config.write_text(TRAIN.format(buckets=left_out, manifest=manifest, steps=2))
    cfg = load_train_config(config)
    little, more = memory_for(2e6), memory_for(20e6)
    names = ["256 x 1", "144p x 1"]
    expected = fit(cfg, 2, little, names=names, device="cpu").sizes
    assert expected != fit(cfg, 2, 2 * little, names=names, device="cpu").sizes

    outputs = tmp_path / "run"
    run_ranks(2, train_with_memory, config, little, [f"outputs={outputs}", "max_steps=1"], None)
    log = (outputs / "train.log").read_text()
    assert log.count("batch sizes chosen for") == 1 and "decided by memory" in log

    run_ranks(2, train_with_memory, config, more, [f"outputs={outputs}"], "auto")
    resumed = (outputs / "train.log").read_text()[len(log) :]
    assert "batch sizes of the run are kept" in resumed and "chosen for" not in resumed
    for step in (1, 2):
        state = json.loads((outputs / f"step_{step:08d}" / "state.json").read_text())
        buckets = state["config"]["bucket_config"]
        found = {"256 x 1": buckets["256"]["1"][1], "144p x 1": buckets["144p"]["1"][1]}
        assert found == expected and buckets["144p"]["3"][1] == 2


@pytest.mark.parametrize(
    ("options", "resume", "message"),
    [
        (["batch_order=mixed"], "auto", r"got batch_order mixed \(there by_cost\) to resume from"),
        (["bucket_config={'144p': {3: (1.0, 2)}}"], "auto", r"got buckets \w+ \(there \w+\) to"),
        (["dataset.frame_interval=2"], "auto", r"got buckets \w+ \(there \w+\)"),
        (["bucket_config={'2k': {900: (1.0, 2)}}"], None, "(?s)got no clip for any bucket.*fewer"),
    ],
)
def test_other_buckets_or_another_order_are_refused(
    folder: Path, options: list[str], resume: str | None, message: str
) -> None:
    cfg = load_train_config(folder / "config.py", [f"outputs={folder / '2x1'}", *options])
    with pytest.raises(ValueError, match=message):
        preflight(cfg, resume)
