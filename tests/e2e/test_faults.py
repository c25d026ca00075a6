"""Runs in which a rank raises, or whose launcher exits: how they end, and what they leave behind.

Each is a small training as users start it, in which ``planted_faults.py`` plants the fault. The
campaigns have the other faults, on every rank and at every place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import FOR_LONG, ElasticJob, Job, assert_stopped_well
from planted_faults import Fault

from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.paths import committed_checkpoints
from opensora_sp.training.metrics import read_metrics

pytestmark = pytest.mark.slow


def test_the_first_error_ends_all_ranks_and_is_reported_last(
    config: Path, tmp_path: Path, jobs: list[Job]
) -> None:
    # In the third step.
    job = Job(tmp_path, config, launcher="torchrun", faults={0: Fault("forward", 1, 5, "raise")})
    jobs.append(job)
    error = "rank 1 failed: ValueError: got a planted error; expected none; remove it"
    job.until(error)
    job.until_gone(30)
    assert job.process.returncode == 1
    log, _, report = job.text.partition("tests/helpers/planted_faults.py FAILED")
    assert f"rank 0 stops: {error}" in log
    for text in (log, report):
        assert text.count("got a planted error") == 1, job.text
    assert job.text.rstrip().splitlines()[-2].endswith(error)
    assert error in (job.outputs / "train.log").read_text()


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


def test_the_launcher_starts_killed_ranks_again_which_resume(
    config: Path, tmp_path: Path, jobs: list[Job]
) -> None:
    """In a save, and while they resume; ``test_kill.py`` compares the bits of next starts."""
    faults = {0: Fault("save", 1, 2, "SIGKILL"), 1: Fault("resume", 0, 1, "SIGKILL")}
    options = ("max_steps=6", "ckpt_every=2")
    job = ElasticJob(tmp_path, config, *options, faults=faults, restarts=2)
    jobs.append(job)
    assert job.process.wait(120) == 0, job.text
    job.until_gone(15)

    assert all((job.pids / f"struck-{attempt}").exists() for attempt in faults), job.text
    assert [line["step"] for line in read_metrics(job.outputs)] == [1, 2, 3, 4, 5, 6]
    for checkpoint in committed_checkpoints(job.outputs):
        verify(checkpoint)
    assert not [path for path in job.outputs.iterdir() if ".partial" in path.name]
