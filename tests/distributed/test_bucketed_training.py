"""Training on mixed buckets: any (dp, sp), resume in the middle of an epoch, corrupt samples."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch.distributed as dist
from mixed_clips import BUCKETS, TRAIN, write_mixed_set
from ranks import run_ranks
from runs import losses

from opensora_sp.checkpoint import newest_checkpoint
from opensora_sp.config import load_train_config
from opensora_sp.features.build import make_dataset
from opensora_sp.parallel import shutdown_process_group
from opensora_sp.training.metrics import log_to, read_metrics
from opensora_sp.training.preflight import check_resume, preflight
from opensora_sp.training.trainer import Trainer

STEPS = 7


def train_in_worlds(config: Path, runs: list[tuple[int, list[str], str | None]]) -> None:
    """One run after the other on the first so many of these processes, as ``train`` does it."""
    from opensora_sp.plugin import current_device

    rank = dist.get_rank()
    shutdown_process_group()
    for world_size, options, resume in runs:
        if rank >= world_size:
            continue
        os.environ["WORLD_SIZE"] = str(world_size)
        cfg = load_train_config(config, options)
        store = f"file://{cfg.outputs}.store"
        dist.init_process_group("gloo", store, rank=rank, world_size=world_size)
        dataset, checkpoint = preflight(cfg, resume)
        dist.barrier()
        folder = Path(cfg.outputs)
        folder.mkdir(exist_ok=True)
        log_to(folder, enabled=rank == 0)
        Trainer(cfg, dataset, checkpoint, current_device()).train(folder)
        shutdown_process_group()


WORLDS = {"1x1": (1, 1), "2x1": (2, 1), "1x2": (2, 2), "2x2": (4, 2)}


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


@pytest.fixture(scope="module")
def other_worlds(folder: Path) -> Path:
    """The same run in the other worlds, in folders beside those."""
    runs = [
        (n, [f"sp_size={sp}", f"outputs={folder / name}"], None)
        for name, (n, sp) in WORLDS.items()
        if name != "2x1"
    ]
    run_ranks(4, train_in_worlds, folder / "config.py", runs)
    return folder


@pytest.mark.slow
def test_replicas_and_sequence_parallelism_do_not_change_the_losses(other_worlds: Path) -> None:
    """3 micro-batches a step: two replicas take 2 and 1; the one with none left adds nothing."""
    alone = losses(other_worlds / "1x1")
    assert len(alone) == STEPS and len(set(alone)) == STEPS
    for name in WORLDS:
        assert losses(other_worlds / name) == pytest.approx(alone, rel=2e-5), name


def digests(run_dir: Path) -> dict[str, str]:
    """SHA-256 of weights, average and optimizer state after the last step."""
    files = json.loads((run_dir / f"step_{STEPS:08d}" / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


def test_resume_in_the_middle_of_an_epoch_is_exact(folder: Path) -> None:
    """From between two steps of micro-batches of other buckets, to the last bit."""
    log = (folder / "2x1" / "train.log").read_text()
    found = re.search(r"epoch 0: \d+ of 24 clips in (\d+) steps of up to 3 micro-batches", log)
    # Step 2 is inside the epoch, and the run continues into the next.
    assert found and 2 < int(found[1]) < STEPS
    assert losses(folder / "cut") == losses(folder / "2x1")[2:]
    assert digests(folder / "cut") == digests(folder / "2x1") and len(digests(folder / "cut")) == 3


def test_a_run_logs_its_buckets_data_wait_and_corrupt_samples(folder: Path) -> None:
    assert_logged(folder, ["2x1"])
    assert "some wait while others compute" in (folder / "2x1" / "train.log").read_text()


@pytest.mark.slow
def test_runs_in_other_worlds_log_the_same(other_worlds: Path) -> None:
    assert_logged(other_worlds, WORLDS)


def assert_logged(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        log = (folder / name / "train.log").read_text()
        assert "144p x 3" in log and "256 x 1" in log
        summary = json.loads((folder / name / "summary.json").read_text())
        broken = {Path(path).name for path in summary["broken_clips"]}
        assert broken and broken <= {"3.png", "13.mp4"}
        for path in broken:
            assert log.count(f"{path} (") == 1

        lines = read_metrics(folder / name)
        assert all(0 < line["data_wait"] < 1 for line in lines) and lines[-1][
            "replaced_clips"
        ] >= len(broken)
        assert set(summary["files_read"]) == {".mp4", ".png"}
        assert ("data forward" in summary["elements_sent"]) == (WORLDS[name][1] > 1)


@pytest.mark.parametrize(
    ("options", "resume", "message"),
    [
        (
            ["bucket_config={'144p': {3: (1.0, 2)}}"],
            "auto",
            r"got buckets \w+ \(there \w+\) to resume from",
        ),
        (["dataset.frame_interval=2"], "auto", r"got buckets \w+ \(there \w+\)"),
        (
            ["bucket_config={'2k': {900: (1.0, 2)}}"],
            None,
            "(?s)got no clip for any bucket.*fewer pixels than any",
        ),
    ],
)
def test_other_buckets_are_refused(
    folder: Path, options: list[str], resume: str | None, message: str
) -> None:
    cfg = load_train_config(folder / "config.py", [f"outputs={folder / '2x1'}", *options])
    with pytest.raises(ValueError, match=message):
        preflight(cfg, resume)


def test_a_changed_batch_order_is_refused_and_one_without_is_by_cost(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "2x1", run)
    options = [f"outputs={run}"]
    with pytest.raises(ValueError, match=r"got batch_order mixed \(there by_cost\) to resume from"):
        preflight(load_train_config(folder / "config.py", [*options, "batch_order=mixed"]), "auto")

    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    state = json.loads((checkpoint / "state.json").read_text())
    assert state.pop("batch_order") == "by_cost"
    cfg = load_train_config(folder / "config.py", options)
    dataset = make_dataset(cfg)
    (checkpoint / "state.json").write_text(json.dumps(state))
    check_resume(cfg, checkpoint, dataset)
    mixed = cfg.model_copy(update={"batch_order": "mixed"})
    with pytest.raises(ValueError, match=r"got batch_order mixed \(there by_cost\)"):
        check_resume(mixed, checkpoint, dataset)
