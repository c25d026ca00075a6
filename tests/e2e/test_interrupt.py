"""Ctrl-C: SIGINT to the whole process group, as a terminal sends it, or to one rank."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from jobs import FOR_LONG, ElasticJob, Job, assert_stopped_well, command_of, started_ranks
from polling import wait_until

pytestmark = pytest.mark.slow

OURS = re.compile(r'File ".*/(opensora_sp|scripts|tests)/')


def ctrl_c(job: Job) -> None:
    os.killpg(job.process.pid, signal.SIGINT)


def assert_interrupted(job: Job) -> int:
    """A checkpoint of the last step, one line with the option to resume, no traceback of ours.

    Returns the step.
    """
    step = assert_stopped_well(job, "SIGINT")
    assert job.text.count("with a checkpoint; add --resume auto") == 1
    assert not OURS.search(job.text), job.text
    return step


def test_ctrl_c_leaves_a_checkpoint(config: Path, tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, config, *FOR_LONG, "num_workers=1", pause=0.3)
    jobs.append(job)
    job.until("2/1000")
    ctrl_c(job)
    job.until_gone(30)
    assert_interrupted(job)
    assert job.process.returncode == 1 and "Received 2 death signal" in job.text  # torchrun's own


def test_a_signal_to_one_rank_is_reported_with_its_exit_status(
    config: Path, tmp_path: Path, jobs: list[Job]
) -> None:
    job = ElasticJob(tmp_path, config, *FOR_LONG, pause=0.3)
    jobs.append(job)
    job.until("step ")
    os.kill(job.rank(1), signal.SIGINT)
    job.until_gone(30)

    assert_stopped_well(job, "(rank 1: SIGINT), with a checkpoint")
    assert job.process.returncode == 1 and "exitcode  : 130" in job.text
    reported = "stopped by Ctrl-C (SIGINT) with a checkpoint, from which --resume auto resumes"
    assert job.text.count(reported) == 1


def test_ctrl_c_under_colossalai_run(config: Path, tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, config, *FOR_LONG, launcher="colossalai", pause=0.3)
    jobs.append(job)
    job.until("2/1000")
    ctrl_c(job)
    wait_until(
        lambda: all("colossalai" in command_of(pid) for pid in job.left()), 60, lambda: job.text
    )
    assert_interrupted(job)
    assert "Aborted!" in job.text and job.process.poll() is None  # it waits for a copy of itself

    ctrl_c(job)
    job.until_gone(15)
    assert job.process.returncode == 1


def imports_torch(pid: int) -> bool:
    return "/libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_ctrl_c_before_the_ranks_have_joined_ends_them_promptly(
    config: Path, tmp_path: Path, jobs: list[Job]
) -> None:
    """While they import; ``test_preemption.py`` has other moments."""
    job = Job(tmp_path, config, script="scripts/train.py")
    jobs.append(job)
    ranks = wait_until(lambda: started_ranks(job), 60)
    wait_until(lambda: all(imports_torch(rank) for rank in ranks), 60)
    ctrl_c(job)
    job.until_gone(15)
    assert job.process.returncode == 1 and not OURS.search(job.text), job.text
