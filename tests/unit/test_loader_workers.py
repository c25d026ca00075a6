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

from opensora_sp.data import loader
from opensora_sp.data.dataset import ClipShape, CorruptSample, Sample, VideoTextDataset
from opensora_sp.data.loader import StepLoader
from opensora_sp.data.sampler import MicroBatchPlan, ReplicaBatches
from opensora_sp.data.toy import toy_clip
from opensora_sp.data.video import write_video
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
        samples = [Sample(0, 0, ClipShape(1, 16, 16))]
        return iter([SimpleNamespace(samples=samples, micro_batch=None, latent_size=None)] * 4)


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


class StopsItself(Dataset[CorruptSample]):
    """A set whose clip 2 stops the process that reads it."""

    rows = [SimpleNamespace(path=Path(f"{clip}.mp4")) for clip in range(4)]

    def __getitem__(self, sample: Sample) -> CorruptSample:
        if sample.clip == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return CorruptSample(f"{sample.clip}.mp4", "none")


def batches_of(num_samples: int, steps: int) -> ReplicaBatches:
    plan = MicroBatchPlan(
        num_samples=num_samples,
        batch_size=1,
        micro_batches_per_step=1,
        seed=1,
        shape=ClipShape(2, 16, 16),
    )
    return ReplicaBatches(plan, start=0, stop=steps, replica=0, num_replicas=1)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_worker_that_stands_still_ends_the_wait(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "GRACE_SECONDS", 2.0)
    monkeypatch.setattr(loader, "POLL_SECONDS", 0.2)
    batches = batches_of(4, steps=4)
    order = [batches.plan.step(step)[0].ids[0] for step in range(4)]
    steps = StepLoader(
        StopsItself(),
        batches,
        num_workers=num_workers,
        seed=0,
        worker_init_fn=init_worker,
        time_limit=0.1,
    )

    read = []
    message = rf"got nothing from worker {order.index(2) % num_workers} .* begun to read '2\.mp4'"
    with pytest.raises(ValueError, match=message):
        for step in steps:
            read += [batch.micro_batch.ids[0] for batch in step.loaded]
    assert read == order[: order.index(2)]

    begun = time.monotonic()
    steps.close()
    wait_until(lambda: not any(worker.is_alive() for worker in steps._workers))
    assert time.monotonic() - begun < 4


def private_memory(process: Any) -> int:
    return psutil.Process(process.pid).memory_full_info().uss


def test_memory_of_a_worker_stays_flat(tmp_path: Path) -> None:
    """A thread for each clip took 25 kB of each step."""
    write_video(tmp_path / "a.mp4", toy_clip(0, 0).draw(6, 32), fps=8)
    (tmp_path / "clips.csv").write_text("path,text\na.mp4,x\n")
    dataset = VideoTextDataset(str(tmp_path / "clips.csv"))
    steps = StepLoader(dataset, batches_of(1, steps=1200), num_workers=1, seed=0)

    used = {}
    for number, step in enumerate(steps):
        assert len(list(step.loaded)) == 1
        if number in (400, 1100):
            (worker,) = steps._workers
            used[number] = private_memory(worker)
    assert used[1100] - used[400] < 5 << 20
