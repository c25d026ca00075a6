"""Training as users start it: resume, other numbers of processes, corrupt samples, early errors."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from runs import losses, run, run_forked, write_training
from safetensors.torch import load_file

from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.paths import committed_checkpoints
from opensora_sp.checkpoint.writer import Part
from opensora_sp.config import load_train_config
from opensora_sp.runtime import run_lock
from opensora_sp.runtime.run_lock import RunLock
from opensora_sp.training.checkpointing import agree_on, find_checkpoint
from opensora_sp.training.preflight import preflight
from opensora_sp.training.run import _locked


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training(tmp_path_factory.mktemp("set"), 14, broken=(4, 9))


def train(
    config: Path, outputs: Path, *more: str, launcher: str | None = None, ranks: int = 2
) -> str:
    command = ("scripts/train.py", config, "--cfg-options", f"outputs={outputs}", *more)
    if launcher is None:
        done = run_forked(*command, ranks=ranks)
    else:
        done = run(*command, launcher=launcher, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, ``file:name`` each."""
    found = {}
    for part in ("model/model", "ema/model", "optimizer"):
        tensors = load_file(checkpoint / f"{part}.safetensors")
        found |= {f"{part}:{name}": tensor for name, tensor in tensors.items()}
    return found


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go, two processes."""
    outputs = tmp_path_factory.mktemp("whole") / "run"
    train(config, outputs)
    return outputs


FILES = {"config.py", "train.log", "tensorboard", "loss.png", "metrics.jsonl", "summary.json"}


@pytest.mark.core
def test_a_run_leaves_everything_behind(whole: Path) -> None:
    assert {p.name for p in whole.iterdir()} >= FILES
    assert [p.name for p in committed_checkpoints(whole)] == ["step_00000003", "step_00000006"]
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG") and any(
        (whole / "tensorboard").iterdir()
    )
    for checkpoint in committed_checkpoints(whole):
        verify(checkpoint)
    assert not [p for p in whole.rglob("*") if p.suffix in (".pt", ".pth", ".bin", ".pkl")]

    summary = json.loads((whole / "summary.json").read_text())
    assert summary["sp_size"] == 2 and summary["switches"] > 0
    assert summary["files_read"] == {".mp4": 36}
    assert {Path(path).name for path in summary["broken_clips"]} <= {"4.mp4", "9.mp4"} and summary[
        "broken_clips"
    ]
    log = (whole / "train.log").read_text()
    assert "skipped a clip: " in log
    assert log.count("kernels: plain torch (the device is cpu)") == 1
    assert load_train_config(whole / "config.py").sp_size == 2  # the dump loads again


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """At the end every weight, average and moment is the same to the last bit."""
    found, wanted = weights(ours / "step_00000006"), weights(theirs / "step_00000006")
    assert found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def leave_three_steps(whole: Path, outputs: Path) -> None:
    """The folder of a run that was killed after its first checkpoint."""
    shutil.copytree(whole, outputs, ignore=shutil.ignore_patterns("step_00000006", "summary.json"))
    (outputs / "latest").write_text("step_00000003\n")
    for name in ("metrics.jsonl", "train.log"):
        lines = (outputs / name).read_text().splitlines(keepends=True)
        (outputs / name).write_text("".join(lines[:3]))
    assert len(losses(outputs)) == 3


@pytest.mark.core
@pytest.mark.parametrize("launcher", [None, pytest.param("colossalai", marks=pytest.mark.slow)])
def test_resume_continues_bit_by_bit(
    config: Path, whole: Path, tmp_path: Path, launcher: str | None
) -> None:
    outputs = tmp_path / "run"
    leave_three_steps(whole, outputs)
    # A checkpoint of step 3 under another name is none.
    shutil.copytree(outputs / "step_00000003", outputs / "step_00000005")
    options = ("async_save=True", "keep_last=2", "--resume", "auto")
    log = train(config, outputs, *options, launcher=launcher)

    assert "resumed from" in log and "at step 3" in log
    assert "step_00000005/manifest.json is of step 3" in log and "; passed over" in log
    verify(outputs / "step_00000003")
    assert (outputs / "latest").read_text() == "step_00000006\n"
    assert {p.name for p in outputs.iterdir()} >= FILES
    assert losses(outputs) == losses(whole)
    assert_same_weights(outputs, whole)


def test_the_average_begins_at_the_weights_that_a_run_starts_from(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    start = ("sp_size=1", "max_steps=1", f"load={whole}", "ema_decay=0.5", "ema_warmup=False")
    train(config, tmp_path / "run", *start, ranks=1)
    loaded, found = weights(whole / "step_00000006"), weights(tmp_path / "run" / "step_00000001")
    for name in (name for name in found if name.startswith("ema/")):
        weight = name.replace("ema/", "model/")
        torch.testing.assert_close(found[name], (loaded[weight] + found[weight]) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("max_steps", [6, 4])
def test_nothing_is_left_to_do_at_the_end_of_a_run(
    config: Path, whole: Path, tmp_path: Path, max_steps: int
) -> None:
    """At ``max_steps`` and past it: one sentence, status 0, no worker, no file but config.py."""
    outputs = tmp_path / "run"
    shutil.copytree(whole, outputs)
    untouched = (
        "metrics.jsonl",
        "sessions.jsonl",
        "summary.json",
        "latest",
        "step_00000006/COMMIT",
    )
    before = {name: (outputs / name).read_bytes() for name in untouched}
    log = train(config, outputs, f"max_steps={max_steps}", "num_workers=2", "--resume", "auto")
    sentence = f"step_00000006 is of step 6, and the run ends after step {max_steps}; "

    assert log.count(sentence + "to train longer, raise") == 1
    assert "Traceback" not in log and "done:" not in log
    assert {name: (outputs / name).read_bytes() for name in untouched} == before


@pytest.mark.parametrize(
    ("options", "resume", "message"),
    [
        (["dataset.manifest=nowhere.csv"], None, "got manifest 'nowhere.csv', which is not a file"),
        (["batch_size=15"], None, "got 14 clips and batch_size 15"),
        (["precision=fp16"], None, "got precision 'fp16' without CUDA"),
        (["load=nowhere"], None, "got checkpoint 'nowhere', which is not on disk"),
        ([], "nowhere", "got checkpoint path 'nowhere', which is not on disk"),
        (["optimizer.type=HybridAdam"], None, "got optimizer.type 'HybridAdam' without CUDA"),
        (["outputs={whole}", "seed=7"], "auto", r"got seed 7 \(there 42\) to resume from"),
        (["outputs={whole}", "batch_size=2"], "auto", r"got batch_size 2 \(there 3\) to resume"),
        (["outputs={whole}"], "{whole}/step_00000003", "holds newer checkpoints, up to"),
        (
            ["outputs={whole}", "micro_batches_per_step=3"],
            "auto",
            r"got micro_batches_per_step 3 \(there 2\)",
        ),
        (["outputs={whole}"], None, "holds checkpoints of an earlier run.*pass --resume auto"),
        (["outputs={whole}", "model.depth=1"], "auto", r"another model \(depth is 2 there, 1"),
        (["load={whole}", "model.num_heads=2"], None, r"another model \(num_heads is 3 there, 2"),
    ],
)
def test_what_cannot_work_is_refused_before_any_process_group(
    config: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list,
    resume: str,
    message: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    options = [f"outputs={tmp_path}", *(option.format(whole=whole) for option in options)]
    resume = resume and resume.format(whole=whole)
    with pytest.raises(ValueError, match=message):
        preflight(load_train_config(config, options), resume)
    assert not torch.distributed.is_initialized()


def test_a_folder_that_had_checkpoints_is_not_taken_for_a_new_one(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "step_00000003.damaged").mkdir()
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
        preflight(load_train_config(config, [f"outputs={tmp_path}"]), None)


def agree(folders: list[Path]) -> str | None:
    try:
        agree_on(find_checkpoint(folders[torch.distributed.get_rank()], "auto"))
    except ValueError as error:
        return str(error)
    return None


def test_ranks_that_see_different_checkpoints_raise_the_same_error(
    whole: Path, tmp_path: Path
) -> None:
    assert run_ranks(2, agree, [whole, whole]) == [None, None]
    reported = run_ranks(2, agree, [whole, tmp_path])
    assert reported[0] == reported[1] and "(['step_00000006', None], rank by rank)" in reported[0]


def hold(folder: Path) -> str:
    """What a run reports of the folder that it is to hold; its content if it holds it."""
    try:
        with mock.patch.object(run_lock, "LOCAL_WAIT", 0.2), _locked(folder, 60.0):
            names = sorted(path.name for path in folder.iterdir())
            torch.distributed.barrier()
            return str(names)
    except ValueError as error:
        return str(error)


def test_a_folder_that_another_run_holds_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        first, second = run_ranks(2, hold, tmp_path)
    assert first == second and f"process {os.getpid()} of " in first
    assert run_ranks(2, hold, tmp_path) == [str(["run.lock"])] * 2
    assert not list(tmp_path.iterdir())


def test_integer_states_of_an_optimizer_stay_integers() -> None:
    """HybridAdam counts its steps in an int."""
    from opensora_sp.checkpoint.zero_shards import NamedShards

    class Zero:
        def __init__(self, master: torch.Tensor, state: dict) -> None:
            self.optim = type("Optim", (), {"state": {master: state}})()
            self.get_working_to_master_map = lambda: {id(weight): master}

    module = torch.nn.Linear(2, 2, bias=False)
    weight, master = module.weight, torch.zeros(4)
    shards = NamedShards(module, Zero(master, {"step": 3}))
    saved = shards.state_parts()["step/weight"]
    assert isinstance(saved, Part) and saved.tensor.dtype == torch.int64
    shards.set_state("weight", {"step": saved.tensor})
    step = shards.states()["weight"]["step"]
    assert step == 3 and isinstance(step, int)
