"""Runs that lose a rank, a launcher, or their numbers: how they end, and what they leave behind.

Each is a small training as users start it, in which ``faulty.py`` plants the fault. ``make
test-faults`` covers both launchers and either rank; CI runs each fault once.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from jobs import FOR_LONG, Job, assert_stopped_well
from polling import wait_until
from ranks import free_port

from opensora_sp.training.metrics import read_metrics

pytestmark = pytest.mark.slow

grid = pytest.mark.grid


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [
        ("torchrun", 1),
        pytest.param("torchrun", 0, marks=grid),
        pytest.param("colossalai", 0, marks=grid),
        pytest.param("colossalai", 1, marks=grid),
    ],
)
def test_the_first_error_ends_all_ranks_and_is_reported_last(
    config: Path, tmp_path: Path, jobs: list[Job], launcher: str, rank: int
) -> None:
    job = Job(tmp_path, config, launcher=launcher, faults={0: ("raise", rank, 2)})
    jobs.append(job)
    error = "ValueError: got a planted error; expected none; remove it"
    job.until(f"rank {rank} failed: {error}")
    job.until_gone(30)
    assert job.process.returncode == 1
    log, _, report = job.text.partition("tests/helpers/faulty.py FAILED")
    assert f"rank {1 - rank} stops: rank {rank} failed: {error}" in log
    assert (
        rank == 0 or log.count("got a planted error") == report.count("got a planted error") == 1
    ), job.text
    if launcher == "torchrun":  # colossalai adds its whole command to that
        assert job.text.rstrip().splitlines()[-2].endswith(f"rank {rank} failed: {error}")
    assert f"rank {rank} failed: {error}" in (job.outputs / "train.log").read_text()


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=grid)])
def test_the_ranks_of_another_node_end_too(
    config: Path, tmp_path: Path, jobs: list[Job], rank: int
) -> None:
    """Two torchruns, neither of which hears of the other's ranks."""
    port = free_port()
    for node in (0, 1):
        jobs.append(
            Job(
                tmp_path, config, launcher=f"node {node}", faults={0: ("raise", rank, 2)}, port=port
            )
        )
    for node, job in enumerate(jobs):
        job.until(f"rank {rank} failed: ValueError: got a planted error")
        job.until_gone(30)
        assert job.process.returncode == 1
        if node != rank:
            assert f"rank {node} stops: rank {rank} failed" in job.text


# When a rank is stopped: what the other one logs, within these seconds.
STOPS = {
    "stop before joining": (r"error \(rank {other}\): got .*rank {rank}", 40),
    "stop before the group": (r"rank {other} stops: got no process group .*: rank {rank} did", 40),
    "stop before heartbeats": (r"rank {other} stops: got no process group .*: rank {rank} did", 40),
    "stop": (r"rank {other} stops: rank {rank}.*(which hosts the store|no heartbeat for 5 s)", 10),
}


def await_report(job: Job, rank: int, pattern: str, seconds: float) -> None:
    """Wait until the other rank logs why it ends, in the attempt that runs."""
    start = len(job.text)
    expected = re.compile(pattern.format(rank=rank, other=1 - rank))
    wait_until(lambda: expected.search(job.text, start), seconds, lambda: job.text)


@pytest.mark.parametrize(
    ("rank", "kinds"),
    [
        (1, ["stop before the group"]),
        pytest.param(0, list(STOPS), marks=grid),
        pytest.param(1, list(STOPS), marks=grid),
    ],
)
def test_ranks_end_where_one_is_stopped_and_the_next_start_works(
    config: Path,
    tmp_path: Path,
    jobs: list[Job],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    kinds: list[str],
) -> None:
    """Rank 0 hosts the store of the heartbeats, which then answers nobody."""
    monkeypatch.setenv("OPENSORA_SP_JOIN_TIMEOUT", "20")
    faults = {attempt: (kind, rank, 2) for attempt, kind in enumerate(kinds)}
    job = Job(tmp_path, config, "peer_timeout=5", restarts=len(faults), faults=faults)
    jobs.append(job)

    for attempt, kind in enumerate(kinds):
        wait_until((job.pids / f"stopped-{attempt}").exists, 120, lambda: job.text)
        await_report(job, rank, *STOPS[kind])
        stopped = job.rank(rank, attempt)
        job.until(f"Sending process {stopped} closing signal SIGTERM", 15)
        # Else torchrun would wait 30 s for it to handle SIGTERM.
        os.kill(stopped, signal.SIGCONT)

    assert job.process.wait(120) == 0, job.text
    job.until_gone(10)
    assert job.text.count(f"rank {1 - rank} was at") == len(set(kinds) - {"stop before joining"})
    assert [line["step"] for line in read_metrics(job.outputs)] == [1, 2, 3, 4, 5, 6]


def test_ranks_whose_colossalai_run_has_gone_stop_with_a_checkpoint(
    config: Path, tmp_path: Path, jobs: list[Job]
) -> None:
    """It does not forward SIGTERM; ``test_preemption.py`` has the other launcher."""
    job = Job(tmp_path, config, *FOR_LONG, launcher="colossalai", pause=0.3)
    jobs.append(job)
    job.until("2/1000")
    job.process.terminate()
    # One of its copies waits for a signal that nobody sends.
    job.until_gone(30, but="colossalai")
    assert_stopped_well(job, f"the launcher (process {job.process.pid}) has exited")
