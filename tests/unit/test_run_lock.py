"""One run for each folder, whatever the run before it died of."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from exits import recorded_exits
from polling import wait_until
from runs import ROOT

from opensora_sp.runtime import run_lock
from opensora_sp.runtime.run_lock import LOCK, Holder, RunLock

OURS = Holder.of_this_process()
FAR = replace(OURS, host="beta", machine="another machine")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "LOCAL_WAIT", 0.2)
    monkeypatch.setattr(run_lock, "LOOK_INTERVAL", 0.05)


def write_lock(folder: Path, holder: Holder) -> Path:
    (folder / LOCK).write_text(json.dumps(asdict(holder)))
    return folder / LOCK


def holder_of(folder: Path) -> Holder:
    return Holder(**json.loads((folder / LOCK).read_text()))


def test_a_second_run_is_refused_until_the_first_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "runs/one"
    with pytest.raises(KeyError), RunLock(folder):
        with pytest.raises(ValueError) as refused, RunLock(folder):
            raise AssertionError("entered")
        raise KeyError

    first = f"process {os.getpid()} of {os.uname().nodename}"
    assert str(refused.value).startswith(f"got outputs '{folder}', which {first} since 20")
    assert f"{folder} is locked by {first} since 20" in caplog.text
    assert caplog.text.count("waiting up to 0.2 s for its end") == 1
    assert "expected one run for each folder; wait for that run or end it" in str(refused.value)

    with RunLock(folder):
        assert [path.name for path in folder.iterdir()] == [LOCK]
    assert not list(folder.iterdir())


HOLD = """
import sys, time
from pathlib import Path
from opensora_sp.runtime.run_lock import RunLock

with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process that holds the folder until it gets a line, or is killed."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], **pipes)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    process.stdin.close()


@pytest.mark.parametrize("end", ["released", "killed"])
def test_a_start_waits_for_a_run_of_this_host_that_is_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holding: subprocess.Popen, end: str
) -> None:
    with pytest.raises(ValueError, match=f"which process {holding.pid} of "), RunLock(tmp_path):
        raise AssertionError("entered")

    monkeypatch.setattr(run_lock, "LOCAL_WAIT", 20.0)
    leave = holding.stdin.close if end == "released" else holding.kill
    threading.Timer(0.3, leave).start()
    with RunLock(tmp_path):
        assert holder_of(tmp_path).pid == os.getpid()
    assert not list(tmp_path.iterdir())


def test_a_lock_of_this_host_is_free_when_its_process_has_ended(
    tmp_path: Path, holding: subprocess.Popen
) -> None:
    holding.kill()
    holding.wait()
    assert holder_of(tmp_path).pid == holding.pid
    begun = time.monotonic()
    with RunLock(tmp_path):
        assert holder_of(tmp_path).pid == os.getpid() and time.monotonic() - begun < 5


def test_a_link_or_a_pipe_in_its_place_is_not_written_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("text")
    (tmp_path / LOCK).symlink_to(victim)
    with pytest.raises(ValueError, match="in which no file can be made"):
        RunLock(tmp_path).__enter__()
    assert victim.read_text() == "text"

    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(ValueError, match="in which no file can be made"):
        RunLock(tmp_path).__enter__()


def test_a_lock_of_another_host_is_stale_without_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So is one whose content is no holder."""
    monkeypatch.setattr(run_lock, "STALE_AFTER", 0.5)
    path = write_lock(tmp_path, FAR)
    with caplog.at_level(logging.INFO), RunLock(tmp_path):
        assert holder_of(tmp_path).host == OURS.host
    assert "is locked by process" in caplog.text and "of beta since" in caplog.text

    path.write_text("[1, 2")
    with RunLock(tmp_path):
        assert holder_of(tmp_path).host == OURS.host


def test_heartbeats_of_another_host_refuse_a_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread writes them."""
    monkeypatch.setattr(run_lock, "INTERVAL", 0.1)
    monkeypatch.setattr(run_lock, "STALE_AFTER", 1.0)
    own = Holder.of_this_process
    monkeypatch.setattr(Holder, "of_this_process", lambda: FAR)
    with RunLock(tmp_path):
        monkeypatch.setattr(Holder, "of_this_process", own)
        with pytest.raises(ValueError, match="of beta since .* holds"), RunLock(tmp_path):
            raise AssertionError("entered")

    # A run that writes heartbeats while it saves, and then ends.
    monkeypatch.setattr(run_lock, "STALE_AFTER", 20.0)
    path = write_lock(tmp_path, FAR)
    threading.Timer(0.2, os.utime, (path,)).start()
    threading.Timer(0.5, path.unlink).start()
    with RunLock(tmp_path):
        assert holder_of(tmp_path).host == OURS.host


def test_a_start_for_which_other_ranks_wait_names_the_holder_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats that were watched for a shorter time do not prove that the lock is stale."""
    monkeypatch.setattr(run_lock, "LOCAL_WAIT", 60.0)
    started = time.monotonic()
    for held in (nullcontext(write_lock(tmp_path, FAR)), RunLock(tmp_path)):
        with held, pytest.raises(ValueError, match="which process .* holds"):
            RunLock(tmp_path, patience=0.3).__enter__()
        (tmp_path / LOCK).unlink(missing_ok=True)
    assert time.monotonic() - started < 20


def take(folder: Path, start: threading.Barrier, tried: threading.Barrier, taken: object) -> None:
    start.wait(20)
    lock = RunLock(folder)
    try:
        with lock:
            taken.put(os.getpid())
            tried.wait(20)
    except ValueError:
        tried.wait(20)


def test_of_many_starts_at_once_one_takes_a_stale_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    count = 4
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_lock(folder, replace(OURS, pid=0))
        start, tried = context.Barrier(count), context.Barrier(count)
        taken = context.SimpleQueue()
        starts = [
            context.Process(target=take, args=(folder, start, tried, taken)) for _ in range(count)
        ]
        for process in starts:
            process.start()
        for process in starts:
            process.join(30)

        taken.get()
        assert taken.empty() and not list(folder.iterdir())


def test_a_run_whose_lock_is_taken_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_lock, "INTERVAL", 0.1)
    with recorded_exits() as codes, RunLock(tmp_path):
        time.sleep(0.3)
        assert not codes
        (tmp_path / LOCK).unlink()
        write_lock(tmp_path, FAR)
        wait_until(lambda: codes)
    assert codes == [1] and "replaced while the run held it" in caplog.text
    assert holder_of(tmp_path) == FAR


def test_a_folder_that_is_gone_for_a_while_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "INTERVAL", 0.1)
    folder, away = tmp_path / "run", tmp_path / "away"
    with recorded_exits() as codes, RunLock(folder):
        folder.rename(away)
        time.sleep(0.6)
        away.rename(folder)
        back = (folder / LOCK).stat().st_mtime_ns
        wait_until(lambda: (folder / LOCK).stat().st_mtime_ns > back)
    assert not codes and not list(folder.iterdir())


def test_disks_without_locks_and_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(number: int) -> None:
        def flock(descriptor: int, operation: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    refuse(errno.ENOLCK)
    with RunLock(tmp_path):
        pass
    assert f"{tmp_path} is not locked against a second run" in caplog.text

    refuse(errno.EROFS)
    with pytest.raises(ValueError, match=r"no file can be made \(Read-only file system\)"):
        RunLock(tmp_path).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="got outputs .*, in which no file can be made"):
        RunLock(tmp_path / "file").__enter__()
