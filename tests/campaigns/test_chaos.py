"""Chaos: one run whose ranks die of many causes ends with the bits of an undisturbed run.

After each fault the launcher starts the ranks again (``--max-restarts``), which resume.
"""

from __future__ import annotations

import os
import pkgutil
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from disturbed import (
    UndisturbedRuns,
    assert_same_bits,
    start,
    write_disturbed_training,
)
from jobs import Job
from planted_faults import MOMENTS, Fault

from campaigns.case import Case, with_sample
from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.paths import committed_checkpoints
from opensora_sp.training.metrics import read_metrics

pytestmark = pytest.mark.campaign(bar="final bits equal to those of the undisturbed run", size=100)
OPTIONS = ("peer_timeout=10", "collective_timeout=15")
PER_ATTEMPT = 2.5  # steps: more than the average attempt saves


@dataclass(frozen=True)
class Chaos:
    """A run of two ranks, each attempt of which ends with a fault, except the last one."""

    faults: tuple[Fault, ...]
    launcher: str = "warm"
    num_workers: int = 0

    @property
    def steps(self) -> int:
        return 8 if len(self.faults) < 5 else int(PER_ATTEMPT * len(self.faults))

    @property
    def options(self) -> tuple[str, ...]:
        return (*OPTIONS, f"max_steps={self.steps}", f"num_workers={self.num_workers}")


# Moments with how often a rank may have reached them: within about two steps of a start.
KILLS = {
    **dict.fromkeys(("joining", "group", "connecting", "model", "resume", "validation"), 1),
    **dict.fromkeys(("data", "encode", "forward", "backward"), 5),
    **dict.fromkeys(("update", "outcome"), 3),
    **dict.fromkeys(("save", "commit"), 2),
    "write": 8,
}
ERRORS = {"forward": 4, "data": 4, "validation": 1, "resume": 1}
STOPS = {"forward": 4, "update": 2}
CAUSES = {"SIGKILL": KILLS, "raise": ERRORS, "SIGSTOP": STOPS}
WEIGHTS = {"SIGKILL": 12, "raise": 4, "SIGSTOP": 2}

# The first fault leaves a checkpoint, so that all others can strike in a resume.
FIRST = Fault("save", 1, 2, "SIGKILL")
SAMPLE = Chaos(
    (
        FIRST,
        Fault("resume", 0, 1, "SIGKILL"),
        Fault("write", 0, 5, "SIGKILL"),
        Fault("validation", 1, 1, "raise"),
    )
)


def draw(random: Random) -> Fault:
    """A cause, a moment and a rank."""
    (action,) = random.choices(list(WEIGHTS), list(WEIGHTS.values()))
    moment = random.choice(list(CAUSES[action]))
    rank = 0 if moment in ("write", "commit") else random.randrange(2)
    return Fault(moment, rank, random.randint(1, CAUSES[action][moment]), action)


def cases(random: Random) -> list[Case]:
    many = Chaos((FIRST, *(draw(random) for _ in range(99))), num_workers=1)
    torchrun = Chaos((FIRST, *(draw(random) for _ in range(3))), "torchrun")
    named = [
        Case("4 faults", SAMPLE, trials=4),
        Case("100 faults", many, trials=100),
        Case("4 faults under torchrun", torchrun, trials=4),
    ]
    return with_sample(named, ["4 faults"])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_disturbed_training(tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> UndisturbedRuns:
    return UndisturbedRuns(config, tmp_path_factory.mktemp("whole"))


def with_last_checkpoint(steps: int) -> tuple[str, ...]:
    return (f"max_steps={steps}", f"ckpt_every={steps}")


def await_end(job: Job, faults: tuple[Fault, ...], seconds: float) -> None:
    """Wait for the end of a run; ranks that are stopped are killed, as the launcher would."""
    deadline = time.monotonic() + seconds
    stops = {n: fault.rank for n, fault in enumerate(faults) if fault.action == "SIGSTOP"}

    while job.process.poll() is None:
        assert time.monotonic() < deadline, f"still runs after {seconds:g} s:\n{job.text[-5000:]}"
        for attempt, rank in list(stops.items()):
            if (job.pids / f"struck-{attempt}").exists():
                # It has SIGTERM from the launcher, which would wait 30 s for it.
                pid = job.rank(rank, attempt)
                if re.search(rf"process {pid} (via|closing) signal SIGTERM", job.text):
                    os.kill(pid, signal.SIGKILL)
                    del stops[attempt]
        time.sleep(0.2)


def run_through(chaos: Chaos, config: Path, folder: Path, jobs: list[Job], seconds: float) -> Job:
    """A run with these faults, each of which must have struck, to its last step."""
    how = {} if chaos.launcher == "warm" else {"launcher": chaos.launcher}
    faults = chaos.faults
    planned = dict(enumerate(faults))
    job = start(jobs, folder, config, *chaos.options, faults=planned, restarts=len(faults), **how)

    await_end(job, faults, seconds)
    assert job.process.wait(5) == 0, job.text[-5000:]
    job.until_gone(15)
    missing = [n for n in planned if not (job.pids / f"struck-{n}").exists()]
    assert not missing, f"faults {[faults[n] for n in missing]} did not strike"
    return job


def assert_undisturbed(job: Job, steps: int, wanted: Path) -> None:
    """Nothing shows that a run was disturbed: its steps, its checkpoints and its last bits."""
    assert [line["step"] for line in read_metrics(job.outputs)] == list(range(1, steps + 1))
    for checkpoint in committed_checkpoints(job.outputs):
        verify(checkpoint)
    leftovers = [path.name for path in job.outputs.iterdir() if ".partial" in path.name]
    assert not leftovers and not list(job.outputs.glob("*.damaged")), leftovers
    assert_same_bits(job.outputs, wanted, steps)


def test_every_call_exists() -> None:
    for what in MOMENTS.values():
        assert callable(pkgutil.resolve_name(what))


def test_the_run_ends_with_the_bits_of_an_undisturbed_one(
    case: Case,
    config: Path,
    whole: UndisturbedRuns,
    tmp_path: Path,
    jobs: list[Job],
) -> None:
    chaos: Chaos = case.arguments
    job = run_through(chaos, config, tmp_path, jobs, seconds=120 + 30 * len(chaos.faults))
    assert_undisturbed(job, chaos.steps, whole[with_last_checkpoint(chaos.steps)])
    killed = f"rank 1 (process {job.rank(1)})"
    assert f"rank 0 stops: {killed} has exited without reporting an error" in job.text
