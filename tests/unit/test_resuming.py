"""Where ``--resume auto`` resumes, and what a start changes in a folder that it cannot resume."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from damage import content
from ranks import run_ranks

from opensora_sp.checkpoint.checkpoint_folder import CheckpointFolder
from opensora_sp.checkpoint.paths import checkpoint_name, committed_checkpoints
from opensora_sp.checkpoint.tensor_file import Spec
from opensora_sp.checkpoint.writer import Part, SaveJob, Saver, all_finite
from opensora_sp.training import run
from opensora_sp.training.checkpointing import Checkpoints, choose_checkpoint, find_checkpoint

FILES = ("model/model.safetensors", "ema/model.safetensors", "optimizer.safetensors")
FIRST, SECOND = checkpoint_name(1), checkpoint_name(2)


def commit(run_dir: Path, step: int) -> Path:
    """A checkpoint of one trained weight, and a buffer that is infinite as a mask may be."""
    state = {"step": step, "parameter_groups": [{"parameters": ["weight"]}]}
    small = {"state.json": json.dumps(state).encode()}
    folder = CheckpointFolder(run_dir / checkpoint_name(step), small)

    files = {}
    for file in FILES:
        weight = torch.full((5,), float(step))
        names = {"exp_avg/weight": weight}
        if file.endswith("model.safetensors"):
            names = {"weight": weight, "mask": torch.tensor([0.0, -float("inf")])}
        files[file] = {name: Part.whole(tensor) for name, tensor in names.items()}
    Saver().save(SaveJob(folder, files))
    return folder.final


def other_format(folder: Path) -> None:
    (folder / "COMMIT").write_text(f"9 {(folder / 'COMMIT').read_text().split()[1]}\n")


def unreadable(folder: Path) -> None:
    """Reads fail with EIO, also for root."""
    (folder / "COMMIT").unlink()
    (folder / "COMMIT").symlink_to("/proc/self/mem")


def damaged(folder: Path) -> None:
    with (folder / "optimizer.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")


def truncated(folder: Path) -> None:
    os.truncate(folder / "state.json", 3)


HARMS: dict[str, Callable[[Path], Any]] = {
    function.__name__: function for function in (other_format, unreadable, damaged, truncated)
}


def start(run_dir: Path, resume: str) -> str | None:
    """What a rank does at its start: the name of the chosen checkpoint, or the error."""
    try:
        found = find_checkpoint(run_dir, resume)
        chosen = choose_checkpoint(run_dir, found, resume=resume)
        return None if chosen is None else chosen.name
    except ValueError as error:
        return str(error)


def start_all(cases: list[tuple[Path, str]]) -> list[str | None]:
    return [start(run_dir, resume) for run_dir, resume in cases]


def on_two_ranks(*cases: tuple[Path, str]) -> list[str | None]:
    """``start`` of each case, one after the other; the same on both ranks."""
    first, second = run_ranks(2, start_all, list(cases), timeout=60)
    assert first == second
    return first


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    run_dir = tmp_path_factory.mktemp("run")
    commit(run_dir, 1)
    commit(run_dir, 2)
    return run_dir


def test_only_what_is_damaged_is_set_aside_for_the_checkpoint_before_it(
    two: Path, tmp_path: Path
) -> None:
    before = {}
    for name, harm in HARMS.items():
        shutil.copytree(two, tmp_path / name)
        harm(tmp_path / name / SECOND)
        before[name] = content(tmp_path / name)

    # Two starts each.
    cases = [(tmp_path / name, "auto") for name in before]
    chosen = on_two_ranks(*cases, *cases)

    assert chosen == [FIRST] * 8
    for name in ("other_format", "unreadable"):
        assert content(tmp_path / name) == before[name]
    for name in ("damaged", "truncated"):
        names = {path.name for path in (tmp_path / name).glob("step_*")}
        assert names == {FIRST, f"{SECOND}.damaged"}


def test_without_a_good_checkpoint_every_start_raises_until_the_user_begins_anew(
    two: Path, tmp_path: Path
) -> None:
    before = {}
    for name, harm in HARMS.items():
        shutil.copytree(two, tmp_path / name)
        harm(tmp_path / name / FIRST)
        harm(tmp_path / name / SECOND)
        before[name] = content(tmp_path / name)
    cases = [(tmp_path / name, "auto") for name in before]

    for error in on_two_ranks(*cases, *cases):
        assert "had checkpoints, of which none can be resumed (the newest: got " in error
        assert "start from step 0 with --resume none or another --cfg-options outputs" in error
    for name in before:
        assert content(tmp_path / name) == before[name]

    # Then neither "none" nor the starts after it find anything, and every byte is still there.
    anew = [(run_dir, "none") for run_dir, _ in cases]
    assert on_two_ranks(*anew, *cases) == [None] * 8
    for name in before:
        kept = content(tmp_path / name)
        del before[name]["latest"]
        assert sorted(kept.values()) == sorted(before[name].values())
        names = {path.name for path in (tmp_path / name).iterdir()}
        assert names == {f"{FIRST}.previous", f"{SECOND}.previous"}


def test_only_an_interrupted_first_save_starts_from_step_0(two: Path, tmp_path: Path) -> None:
    (tmp_path / "partial" / f".partial-{FIRST}").mkdir(parents=True)
    shutil.copytree(two / FIRST, tmp_path / "renamed" / FIRST)
    (tmp_path / "renamed" / FIRST / "COMMIT").unlink()
    for name in ("new", "partial", "renamed"):
        assert find_checkpoint(tmp_path / name, "auto") is None

    # What earlier versions have left of damaged checkpoints, and a run whose COMMIT are gone.
    shutil.copytree(two / FIRST, tmp_path / "set aside" / f"{FIRST}.damaged")
    shutil.copytree(two, tmp_path / "no COMMIT")
    for step in (FIRST, SECOND):
        (tmp_path / "no COMMIT" / step / "COMMIT").unlink()
    for name in ("set aside", "no COMMIT"):
        with pytest.raises(ValueError, match="only its traces are left"):
            find_checkpoint(tmp_path / name, "auto")

    cases = [(tmp_path / name, "none") for name in ("set aside", "no COMMIT")]
    cases += [(run_dir, "auto") for run_dir, _ in cases]
    assert on_two_ranks(*cases) == [None] * 4
    kept = [path.name for path in (tmp_path / "no COMMIT").iterdir()]
    assert sorted(kept) == [f"{FIRST}.previous", f"{SECOND}.previous"]


def test_a_good_checkpoint_is_neither_left_out_nor_begun_anew(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "run")
    other_format(tmp_path / "run" / SECOND)
    before = content(tmp_path / "run")

    (error,) = on_two_ranks((tmp_path / "run", "none"))
    assert f"got --resume none while {tmp_path / 'run' / FIRST} can be resumed" in error
    with pytest.raises(ValueError, match=f"holds newer checkpoints, up to {SECOND}"):
        find_checkpoint(tmp_path / "run", str(tmp_path / "run" / FIRST))
    assert content(tmp_path / "run") == before


def test_a_folder_that_cannot_be_listed_has_a_sentence(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ValueError, match=r"cannot be read now \(Permission denied\)"):
        find_checkpoint(two, "auto")


def state_of_a_run(weight: torch.Tensor) -> Any:
    """What a save takes of a ``TrainingState``."""
    optimizer = SimpleNamespace(loss_scale_state=lambda: None)
    groups = [{"parameters": ["weight"]}]
    part = Part(weight, Spec.of(weight), sharded=True)
    files = {FILES[0]: {"weight": part}, FILES[1]: {"weight": part}, FILES[2]: {}}
    return SimpleNamespace(
        shards=SimpleNamespace(groups=lambda: groups, optimizer=optimizer),
        files=lambda: files,
        json_files=dict,
    )


@pytest.mark.parametrize("in_background", [False, True])
def test_no_save_replaces_good_checkpoints_by_worse_ones(
    tmp_path: Path, in_background: bool
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, in_background=in_background)
    weight = torch.ones(5)
    checkpoints.save(state_of_a_run(weight), {"step": 1})
    checkpoints.save(state_of_a_run(weight), {"step": 2})
    # Steps are skipped.
    checkpoints.save(state_of_a_run(weight), {"step": 3}, rotate=False)

    weight[2] = float("nan")
    message = "NaN or infinity in weight .* after step 4; .*from the last good checkpoint"
    with pytest.raises(ValueError, match=message):
        checkpoints.save(state_of_a_run(weight), {"step": 4})
    kept = [path.name for path in committed_checkpoints(tmp_path)]
    assert kept == ["step_00000002", "step_00000003"]

    weight[2] = 1.0
    checkpoints.save(state_of_a_run(weight), {"step": 5})
    checkpoints.wait()
    assert [path.name for path in committed_checkpoints(tmp_path)] == ["step_00000005"]


@pytest.mark.parametrize(("restarts", "expected"), [("0", "none"), ("1", "auto")])
def test_a_restart_resumes_what_resume_none_has_begun(
    restarts: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torchrun --max-restarts`` repeats the command."""

    class SeenError(Exception):
        pass

    def see(cfg: object, resume: str | None, *args: object, **options: object) -> None:
        raise SeenError(resume)

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setattr(run, "preflight", see)
    monkeypatch.setattr(run, "raise_on_all_ranks", nullcontext)
    cfg: Any = SimpleNamespace(deterministic=False)
    with pytest.raises(SeenError, match=expected):
        run.train(cfg, resume="none")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(value: float) -> None:
    largest = torch.finfo(torch.float32).max
    finite = [torch.full((3,), -largest), torch.ones(2).bfloat16(), torch.empty(0), torch.arange(3)]
    assert all_finite(finite)
    assert not all_finite([*finite, torch.tensor([1.0, value])])
    assert not all_finite([*finite, torch.tensor([1.0, value]).bfloat16()])
