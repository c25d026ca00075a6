"""Checkpoint folders: whole or absent, wherever the process is killed; verified before reads."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, warm_context
from safetensors.torch import load_file, save_file

from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.checkpoint_folder import (
    CheckpointFolder,
    DamagedCheckpointError,
    _commit_text,
    set_aside,
    to_json,
)
from opensora_sp.checkpoint.filesystem import FileSystem
from opensora_sp.checkpoint.paths import checkpoint_name, committed_checkpoints, newest_checkpoint
from opensora_sp.checkpoint.tensor_file import Spec, TensorFile
from opensora_sp.checkpoint.writer import Part, SaveJob, Saver
from opensora_sp.planner.live_peak import LivePeak


class Recorder(FileSystem):
    """Notes every operation; ``before`` and ``after`` may do something to one of them."""

    def __init__(self) -> None:
        self.done: list[tuple[str, Path]] = []

    def perform(self, kind: str, path: Path, action: Callable[[], Any]) -> Any:
        self.done.append((kind, path))
        return action()


class Killer(FileSystem):
    """Sends SIGKILL to its process before, halfway through (a write) or after operation n."""

    def __init__(self, number: int, when: str) -> None:
        self.left, self.when = number, when

    def perform(self, kind: str, path: Path, action: Callable[[], Any]) -> Any:
        self.left -= 1
        mine = self.left == -1
        if mine and self.when == "within":
            action()
            os.truncate(path, path.stat().st_size - 1)
        if mine and self.when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        result = action()
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((3, 5), float(step)),
        "half": torch.ones(3).bfloat16(),
        "count": torch.tensor(step),
    }


def save(run_dir: Path, step: int, filesystem: FileSystem | None = None, **keep: int) -> None:
    """One process saves a checkpoint of two tensor files and some JSON."""
    folder = CheckpointFolder(
        run_dir / checkpoint_name(step), {"state.json": b"{}\n"}, filesystem=filesystem, **keep
    )
    parts = {name: Part.whole(tensor) for name, tensor in tensors(step).items()}
    Saver().save(
        SaveJob(folder, {"model/model.safetensors": parts, "optimizer.safetensors": parts})
    )


def save_in_a_process(*args: Any, **keep: Any) -> int:
    process = warm_context().Process(target=save, args=args, kwargs=keep)
    process.start()
    process.join(60)
    return process.exitcode


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two committed checkpoints, and what a cut-off save has left."""
    run_dir = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        assert save_in_a_process(run_dir, step) == 0
    (run_dir / ".partial-step_00000003").mkdir()
    (run_dir / ".partial-step_00000003" / "junk").write_text("x")
    shutil.copytree(run_dir / "step_00000002", run_dir / "step_00000009")
    (run_dir / "step_00000009" / "COMMIT").unlink()
    return run_dir


def recorded(run_dir: Path) -> list[tuple[str, Path]]:
    recorder = Recorder()
    save(run_dir, 3, recorder, keep_last=2)
    return recorder.done


def points(operations: list[tuple[str, Path]]) -> list[tuple[int, str]]:
    """Before and after operations, and within writes: a tenth of them, and all around the commit.

    ``campaigns/test_kill.py`` kills whole runs at these moments.
    """
    found = []
    for number, (kind, path) in enumerate(operations):
        times = ("before", "within", "after") if kind == "write" else ("before", "after")
        near = kind == "rename" or path.name in ("COMMIT", "step_00000001")
        found += [
            (number, when) for i, when in enumerate(times) if near or (number + 7 * i) % 10 == 0
        ]
    return found


def test_whenever_a_save_is_killed_the_newest_committed_checkpoint_is_whole(
    before: Path, tmp_path: Path
) -> None:
    shutil.copytree(before, tmp_path / "whole")
    operations = recorded(tmp_path / "whole")
    kinds = [kind for kind, _ in operations]
    assert {"write", "flush", "rename", "unlink"} <= set(kinds)

    commit = next(
        i
        for i, (kind, path) in enumerate(operations)
        if path.name == ".partial-COMMIT" and kind == "rename"
    )
    chosen = points(operations)

    assert len(chosen) >= 20
    for number, when in chosen:
        run_dir = tmp_path / f"{number}{when}"
        shutil.copytree(before, run_dir)
        assert save_in_a_process(run_dir, 3, Killer(number, when), keep_last=2) == -signal.SIGKILL
        newest = newest_checkpoint(run_dir)
        assert newest is not None
        committed = number > commit or (number, when) == (commit, "after")
        assert newest.name == checkpoint_name(3 if committed else 2), (operations[number], when)
        for checkpoint in committed_checkpoints(run_dir):
            verify(checkpoint)
        found, wanted = load_file(newest / "model/model.safetensors"), tensors(int(newest.name[-1]))
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        save(run_dir, 4, keep_last=2)  # the next start resumes, and removes what was left
        names = sorted(path.name for path in run_dir.iterdir() if path.is_dir())
        assert names == [checkpoint_name(3 if committed else 2), checkpoint_name(4)]
        assert (run_dir / "latest").read_text() == checkpoint_name(4) + "\n"
        shutil.rmtree(run_dir)


def test_everything_is_flushed_before_the_rename_and_commit_comes_last(
    before: Path, tmp_path: Path
) -> None:
    shutil.copytree(before, tmp_path / "run")
    operations = recorded(tmp_path / "run")
    partial = tmp_path / "run" / ".partial-step_00000003"
    renamed = operations.index(("rename", partial))
    committed = operations.index(("rename", tmp_path / "run" / "step_00000003" / ".partial-COMMIT"))

    assert renamed < committed
    written = {path for kind, path in operations[:renamed] if kind == "write"}
    for path in written | {partial, partial / "model"}:
        last_write = max((i for i, op in enumerate(operations) if op == ("write", path)), default=0)
        assert ("flush", path) in operations[last_write:renamed], path

    assert ("flush", tmp_path / "run") in operations[renamed:committed]
    final = tmp_path / "run" / "step_00000003"
    assert {path.relative_to(partial) for path in written} == {
        path.relative_to(final)
        for path in final.rglob("*")
        if path.is_file() and path.name != "COMMIT"
    }

    removed = [
        path
        for kind, path in operations
        if kind == "unlink" and path.parent.name == "step_00000001"
    ]
    assert removed[0].name == "COMMIT"  # so that half of it is not taken for a checkpoint


def test_keeping_the_last_and_every_nth(tmp_path: Path) -> None:
    for step in range(1, 8):
        (tmp_path / "step_00000099").mkdir(exist_ok=True)  # not committed: does not count
        save(tmp_path, step, keep_last=2, keep_every=3)
    assert [path.name[-1] for path in committed_checkpoints(tmp_path)] == ["3", "6", "7"]
    assert (tmp_path / "latest").read_text() == "step_00000007\n"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def swap(folder: Path) -> None:
    """The optimizer of another step, whole in itself."""
    save_file(
        {**load_file(folder / "optimizer.safetensors"), "count": torch.tensor(7)},
        folder / "optimizer.safetensors",
    )


def use_format(folder: Path, number: int) -> None:
    (folder / "COMMIT").write_text(f"{number} {(folder / 'COMMIT').read_text().split()[1]}\n")


def make_unreadable(path: Path) -> None:
    """Every read of the file fails, also for root."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def make_fifo(path: Path) -> None:
    """A plain ``open`` of it never returns."""
    path.unlink()
    os.mkfifo(path)


def lead_out(path: Path) -> None:
    """A link to a file outside of the folder."""
    path.rename(path.parents[1] / path.name)
    path.symlink_to(path.parents[1] / path.name)


def commit_manifest(folder: Path, **change: Any) -> None:
    """Another manifest with its digest, as whoever made the checkpoint can commit it."""
    manifest = to_json({**json.loads((folder / "manifest.json").read_text()), **change})
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "COMMIT").write_bytes(_commit_text(manifest))


def list_outside(folder: Path, name: str) -> None:
    (folder.parent / "outside").write_text("secret")
    (folder / "link").symlink_to(folder.parent)
    commit_manifest(folder, files={name: {"bytes": 6, "sha256": ""}})


MODEL, OPTIMIZER = "model/model.safetensors", "optimizer.safetensors"
OUTSIDE = ("../outside", "/etc/passwd", "model/../../outside", "link/outside")
ENTRY = {"bytes": 1, "sha256": ""}
STRUCTURES: list[dict[str, Any]] = [
    {"files": []},
    {"files": {"a": 1}},
    {"files": {"a": {"bytes": "1", "sha256": ""}}},
    {"step": None},
    {"files": {"a\0b": ENTRY}},
]
# What contradicts the digests of a checkpoint.
DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: os.truncate(f / MODEL, 40), f"{MODEL} has 40 bytes; expected [0-9]+ bytes, as it"),
    (lambda f: flip(f / MODEL, -1), f"{MODEL} has the SHA-256 .*; expected"),
    (lambda f: flip(f / "state.json", 0), "state.json has the SHA-256"),
    (lambda f: (f / OPTIMIZER).unlink(), f"{OPTIMIZER} is missing; expected [0-9]+ bytes"),
    (swap, f"{OPTIMIZER} has"),
    (lambda f: flip(f / "manifest.json", 100), "manifest.json is not the one that COMMIT names"),
    (lambda f: flip(f / "COMMIT", -5), "manifest.json is not the one that COMMIT names"),
    (lambda f: (f / "COMMIT").write_text(""), "COMMIT holds b''; expected a format"),
    (lambda f: os.truncate(f / "COMMIT", 1 << 40), "COMMIT of more than 1,024 bytes"),
    (lambda f: os.truncate(f / "manifest.json", 1 << 40), "manifest.json of more than"),
    (lambda f: (f / "manifest.json").unlink(), r"manifest.json \(No such file or directory\)"),
]
# What they do not refuse is not called damaged.
OTHERS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: use_format(f, 9), r"got a checkpoint of format 9 in .*; expected 3;"),
    (lambda f: use_format(f, 1), r"got a checkpoint of format 1 in .*; expected 3;"),
    (lambda f: make_fifo(f / "COMMIT"), "COMMIT, which cannot be read now"),
    (lambda f: make_fifo(f / "manifest.json"), "manifest.json, which .* now .a named pipe"),
    (lambda f: f.rename(f.with_name("step_00000008")), "is of step 2; expected the step of the"),
    (lambda f: lead_out(f / "COMMIT"), "the path 'COMMIT' .*; expected one inside this folder"),
    (lambda f: lead_out(f / "manifest.json"), "'manifest.json' .*; expected one inside this"),
    *((partial(list_outside, name=name), "expected one inside this folder") for name in OUTSIDE),
    *((partial(commit_manifest, **change), "; expected .*do not use") for change in STRUCTURES),
]


@pytest.mark.parametrize(
    ("harm", "message", "is_damage"),
    [*((*harm, True) for harm in DAMAGE), *((*harm, False) for harm in OTHERS)],
)
def test_what_is_refused_is_named(
    before: Path, tmp_path: Path, harm: Callable[[Path], Any], message: str, is_damage: bool
) -> None:
    folder = tmp_path / "step_00000002"
    shutil.copytree(before / folder.name, folder)
    verify(folder)
    harm(folder)
    with pytest.raises(ValueError, match=message) as error:
        verify(next(tmp_path.glob("step_*")))
    assert isinstance(error.value, DamagedCheckpointError) == is_damage


def test_an_error_of_the_disk_names_the_file(before: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sha256(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("opensora_sp.checkpoint.checkpoint_folder.sha256", sha256)
    with pytest.raises(ValueError, match="model.safetensors, which cannot be read now") as error:
        verify(before / "step_00000002")
    assert not isinstance(error.value, DamagedCheckpointError)


def test_rotation_neither_counts_nor_removes_what_cannot_be_read(tmp_path: Path) -> None:
    for step in (1, 2, 3, 8, 9):
        save(tmp_path, step)
    use_format(tmp_path / "step_00000002", 9)
    make_unreadable(tmp_path / "step_00000003" / "COMMIT")
    use_format(tmp_path / "step_00000008", 9)

    # A run that resumed from step 1.
    for step in (4, 5):
        save(tmp_path, step, keep_last=1)

    names = [path.name[-1] for path in committed_checkpoints(tmp_path)]
    assert names == ["2", "3", "5", "8", "9"]


def test_a_save_replaces_no_committed_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 2)
    for number in ("", "-2"):
        use_format(tmp_path / "step_00000002", 9)
        save(tmp_path, 2)

        verify(tmp_path / "step_00000002")
        kept = tmp_path / f"step_00000002.previous{number}"
        assert (kept / "COMMIT").read_text().startswith("9 ")


def test_removing_a_checkpoint_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "run" / "folder").mkdir(parents=True)
    (tmp_path / "run" / "folder" / "link").symlink_to(tmp_path / "kept")
    FileSystem().remove_tree(tmp_path / "run")
    assert (tmp_path / "kept" / "file").is_file() and not (tmp_path / "run").exists()
    (tmp_path / "step_00000001").mkdir()
    assert set_aside(tmp_path / "step_00000001").name == "step_00000001.damaged"


def test_checkpoints_that_were_moved_and_linked_stay_where_they_are(tmp_path: Path) -> None:
    """Making room on a disk leaves links behind; a save neither fails at them nor follows them."""

    def save(step: int) -> None:
        folder = CheckpointFolder(
            tmp_path / "run" / checkpoint_name(step), {"state.json": b"{}"}, keep_last=1
        )
        folder.begin()
        folder.finish({})

    save(1)
    (tmp_path / "far").mkdir()
    for name in (checkpoint_name(1), ".partial-mine"):
        (tmp_path / "far" / name).mkdir() if name[0] == "." else (tmp_path / "run" / name).rename(
            tmp_path / "far" / name
        )
        (tmp_path / "far" / name / "file").write_text("x")
        (tmp_path / "run" / name).symlink_to(tmp_path / "far" / name)
    (tmp_path / "run" / checkpoint_name(2)).symlink_to(tmp_path / "gone")
    save(2)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {checkpoint_name(2), "latest"}
    verify(tmp_path / "far" / checkpoint_name(1))
    assert len(list((tmp_path / "far").glob("*/file"))) == 2


def test_a_file_written_in_runs_is_the_librarys_file(tmp_path: Path) -> None:
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    dtypes = (*floats, torch.int64, torch.uint8, torch.bool)
    wanted = {f"{i}": torch.arange(7 * i).reshape(7, i).to(dtype) for i, dtype in enumerate(dtypes)}
    wanted["scalar"] = torch.tensor(3.5)
    file = TensorFile(
        FileSystem(), tmp_path / "a", {name: Spec.of(tensor) for name, tensor in wanted.items()}
    )
    from opensora_sp.checkpoint.tensor_file import file_order

    for name in file_order(file.specs):
        # The sizes include padding.
        flat = torch.cat([wanted[name].flatten(), torch.ones(3).to(wanted[name].dtype)])
        file.append(name, flat.split(4))
    file.close()
    found = load_file(tmp_path / "a")
    assert found.keys() == wanted.keys()
    assert all(
        torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype
        for name in wanted
    )
    assert struct.unpack("<Q", (tmp_path / "a").read_bytes()[:8])[0] % 8 == 0


class Full(FileSystem):
    """A full disk: no write succeeds after so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file: Any, data: Any) -> None:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device", file.name)
        super().write(file, data)


def saves_of_two_ranks(run_dir: Path) -> tuple[list[str], int, int]:
    """Sharded tensors: in the background, on a full disk, and how much memory it takes."""
    rank, world, size = dist.get_rank(), dist.get_world_size(), 1000
    saver, errors = Saver(), []
    whole = {f"{i}": torch.arange(size - i, dtype=torch.float32) + i for i in range(8)}
    length = -(-size // world)
    padded = {
        name: torch.nn.functional.pad(tensor, (0, length * world - len(tensor)))
        for name, tensor in whole.items()
    }
    shards = {name: tensor.view(world, length)[rank].clone() for name, tensor in padded.items()}

    def job(step: int, filesystem: FileSystem | None = None) -> SaveJob:
        parts = {name: Part(shards[name], Spec.of(whole[name]), sharded=True) for name in whole}
        return SaveJob(
            CheckpointFolder(run_dir / checkpoint_name(step), {}, filesystem=filesystem),
            {"a.safetensors": parts},
        )

    peak = LivePeak()
    with peak:
        saver.save(job(1))
    taken = peak.peak
    with peak:
        peak.reset_peak()
        saver.save(job(2), in_background=True)
        for shard in shards.values():
            shard.add_(1)  # the training continues
    saver.wait()
    copies = peak.peak
    for in_background in (False, True):
        try:
            saver.save(job(3, Full(9000)), in_background=in_background)
            saver.wait()
        except ValueError as error:
            errors.append(str(error))
            # Nothing is left of it to fill the disk.
            assert rank or not list(run_dir.glob(".partial-*"))
    saver.save(job(4))  # and then there is room again
    dist.barrier()
    for step, more in ((1, 0), (2, 0), (4, 1)):
        verify(run_dir / checkpoint_name(step))
        found = load_file(run_dir / checkpoint_name(step) / "a.safetensors")
        assert all(torch.equal(found[name], whole[name] + more) for name in whole), step
    return errors, taken, copies


def search_of_two_ranks() -> list[list[str]]:
    """NaN or infinity in a shard of either rank, in either file; and where it is not trained."""
    rank, saver, found = dist.get_rank(), Saver(), []
    nan, inf = float("nan"), float("inf")

    def search(value: float, at_rank: int, at_file: str) -> None:
        files = {}
        for file in ("ema", "optimizer"):
            shard = torch.full((3,), 3e38)
            if (rank, file) == (at_rank, at_file):
                shard[1] = value
            spec = Spec(torch.float32, (6,))
            mask = Part.whole(torch.tensor([0.0, -inf]))
            files[file] = {"a": Part(shard, spec, sharded=True), "mask": mask}
        found.append(saver.non_finite(SaveJob(CheckpointFolder(Path(), {}), files)))

    search(3e38, 0, "ema")
    search(nan, 0, "ema")
    search(inf, 1, "optimizer")
    search(-inf, 1, "ema")
    return found


def test_numbers_that_are_not_finite_are_named_alike_on_all_ranks() -> None:
    first, second = run_ranks(2, search_of_two_ranks, timeout=60)
    expected = [[], ["a in ema (rank 0)"], ["a in optimizer (rank 1)"], ["a in ema (rank 1)"]]
    assert first == second == expected


def test_parts_of_two_ranks_become_whole_tensors(tmp_path: Path) -> None:
    of_ranks = run_ranks(2, saves_of_two_ranks, tmp_path, timeout=60)
    shard_bytes, all_shards = 500 * 4, 8 * 500 * 4
    for errors, taken, copies in of_ranks:
        # The same on every rank.
        assert len(errors) == 2 and all("No space left on device" in text for text in errors)
        assert taken <= shard_bytes  # one part of one tensor at a time
        assert all_shards <= copies <= all_shards + shard_bytes  # a copy of this rank's own parts
    assert [path.name for path in committed_checkpoints(tmp_path)] == [
        checkpoint_name(step) for step in (1, 2, 4)
    ]
