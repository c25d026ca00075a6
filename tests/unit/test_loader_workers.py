"""Workers of a loader end with their rank, also while they wait for a file that never opens."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from polling import wait_until
from torch.utils.data import Dataset

from opensora_sp.data import StepLoader
from opensora_sp.runtime.processes import init_worker, is_alive

FORK = multiprocessing.get_context("fork")


def wait_for_file(pipe: Path) -> None:
    """Opens a named pipe that nobody writes to."""
    init_worker()
    pipe.with_suffix(".ready").touch()
    pipe.open()


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def ready(pipe: Path) -> None:
    wait_until(pipe.with_suffix(".ready").exists)
    time.sleep(0.1)


def start(pipe: Path) -> Any:
    worker = FORK.Process(target=wait_for_file, args=(pipe,), daemon=True)
    worker.start()
    return worker


def test_a_worker_ends_at_sigterm_of_its_rank_alone(pipe: Path) -> None:
    worker = start(pipe)
    ready(pipe)
    for name in ("TERM", "INT", "USR1"):
        subprocess.run(["/bin/kill", f"-{name}", str(worker.pid)], check=True)
    time.sleep(0.3)
    assert worker.is_alive() and os.getpgid(worker.pid) == worker.pid

    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0


def be_killed_with_worker(pipe: Path, pid: Any) -> None:
    worker = FORK.Process(target=wait_for_file, args=(pipe,))
    worker.start()
    pid.send(worker.pid)
    signal.pause()


def test_a_worker_ends_with_its_rank(pipe: Path) -> None:
    pid, theirs = FORK.Pipe(duplex=False)
    rank = FORK.Process(target=be_killed_with_worker, args=(pipe, theirs))
    rank.start()
    worker = psutil.Process(pid.recv())
    ready(pipe)
    rank.kill()
    rank.join()
    wait_until(lambda: not is_alive(worker))


class Blocked(Dataset[None]):
    """A set whose files are all named pipes."""

    def __init__(self, pipe: Path) -> None:
        self.pipe = pipe

    def __getitem__(self, sample: Any) -> None:
        self.pipe.with_suffix(".ready").touch()
        self.pipe.open()


class Requests:
    """What the loader needs of a sampler, when it is not asked for a step."""

    def __iter__(self) -> Iterator[Any]:
        return iter([SimpleNamespace(samples=[0], micro_batch=None, latent_size=None)] * 4)


@pytest.fixture(params=["fork", "forkserver"])
def default_start_method(request: pytest.FixtureRequest) -> Iterator[None]:
    """That of Python up to 3.13, and since 3.14."""
    former = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(request.param, force=True)
    yield
    multiprocessing.set_start_method(former, force=True)


@pytest.mark.usefixtures("default_start_method")
def test_a_loader_forks_workers_and_ends_all_at_once(pipe: Path) -> None:
    """Without ``close``, a ``DataLoader`` waits 5 s for the first of them, and for the next."""
    loader = StepLoader(
        Blocked(pipe), Requests(), num_workers=2, seed=0, worker_init_fn=init_worker
    )
    steps = iter(loader)
    ready(pipe)
    assert {psutil.Process(one.pid).ppid() for one in loader._workers} == {os.getpid()}
    begun = time.monotonic()
    loader.close()
    del steps
    assert time.monotonic() - begun < 4
    assert not [one for one in multiprocessing.active_children() if one in loader._workers]
