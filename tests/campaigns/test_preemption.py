"""Preemption: whoever is asked to stop, by whichever signal, the run is saved and gone in time.

Each case sends a signal at a moment of a training that begins or resumes, and looks at the next
two starts. Most jobs are forked from the warm process; where ranks import, they are real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jobs import ElasticJob, Job, started_ranks
from planted_faults import MOMENTS, ONLY_RANK_0, Fault
from polling import wait_until
from restarts import TINY, Undisturbed, content_of, newest_step

from campaigns.case import Case, with_sample
from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.paths import checkpoint_name, newest_checkpoint
from opensora_sp.training.metrics import read_metrics

SECONDS = 25.0  # torchrun kills ranks after 30
pytestmark = pytest.mark.campaign(
    bar=f"saved and gone within {SECONDS:g} s, 0 steps lost, same bits after the next two starts",
    size=50,
)

LAST = 6  # step of the run
FIRST = 2  # step of the checkpoint from which some begin
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
TARGETS = ("rank 0", "rank 1", "ranks", "launcher", "job")
IN_IMPORTS = 6  # cases with a real launcher
OPTIONS = [*TINY, "grad_checkpoint=False", "ckpt_every=2", "keep_last=3", "grace_time=60"]

# How often a rank reaches a moment at least, where it does more than once.
REACHED = {
    **dict.fromkeys(("data", "encode", "forward", "backward", "update", "outcome"), 4),
    **dict.fromkeys(("save", "validation"), 2),
    **{"commit": 3, "write": 12},
}


@dataclass(frozen=True)
class Preemption:
    """``fault`` at a moment, or while the ranks import: after so many seconds."""

    fault: Fault
    resumes: bool = False  # from the checkpoint of step FIRST
    sp_size: int = 2
    options: tuple[str, ...] = ()
    import_seconds: float | None = None

    @property
    def name(self) -> str:
        fault, seconds = self.fault, self.import_seconds
        moment = f"{fault.moment} {fault.number} of rank {fault.rank}"
        return " ".join(
            (
                f"{fault.action} to {fault.to}, at",
                f"{seconds:.1f} s of imports" if seconds is not None else moment,
                f"(sp {self.sp_size}{', resumed' if self.resumes else ''}) {self.options}",
            )
        )


IN_SAMPLE = (
    Preemption(Fault("validation", 1, 1, "SIGUSR1", "job"), True, options=("num_workers=1",)),
    Preemption(Fault("save", 0, 1, "SIGTERM", "launcher"), options=("async_save=True",)),
)


def shuffled(values: Any, count: int, random: Random) -> list[Any]:
    """``count`` values, each as often as any other, in random order."""
    values = list(values)
    many = (values * (count // len(values) + 1))[:count]
    return random.sample(many, count)


def cases(random: Random) -> list[Case]:
    count = 50 - len(IN_SAMPLE)
    pairs = shuffled(((s, to) for s in SIGNALS for to in TARGETS), count, random)
    in_imports = [None] * IN_IMPORTS
    moments = [*in_imports, *shuffled(MOMENTS, count - IN_IMPORTS, random)]

    drawn = [draw(moment, *pair, random) for moment, pair in zip(moments, pairs)]
    preemptions = [*IN_SAMPLE, *drawn]
    named = [Case(f"{n:02} {one.name}", one) for n, one in enumerate(preemptions)]
    return with_sample(named, [case.name for case in named[: len(IN_SAMPLE)]])


def draw(moment: str | None, action: str, to: str, random: Random) -> Preemption:
    """A preemption at a moment; None is during imports."""
    resumes = random.random() < 0.5 or moment == "resume"
    if moment is None:
        fault = Fault("imports", 0, 0, action, to)
        return Preemption(fault, resumes, import_seconds=random.uniform(0.0, 4.0))

    rank = 0 if moment in ONLY_RANK_0 else random.randrange(2)
    number = random.randint(1, REACHED.get(moment, 1))
    options = ("num_workers=1", "async_save=True")
    return Preemption(
        Fault(moment, rank, number, action, to),
        resumes,
        sp_size=random.choice((1, 2)),
        options=tuple(option for option in options if random.random() < 0.4),
    )


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(config, tmp_path_factory.mktemp("undisturbed"))


def preempt(one: Preemption, start_job: Callable[..., Job]) -> tuple[Job, float]:
    """The job, and when it got its signal."""
    if one.import_seconds is not None:
        job = start_job(f"max_steps={LAST}", launcher="torchrun", script="scripts/train.py")
        ranks = wait_until(lambda: started_ranks(job), 60, lambda: job.text)
        time.sleep(one.import_seconds)
        for pid in imported_by(one.fault.to, job, ranks):
            os.kill(pid, signal.Signals[one.fault.action])
        return job, time.monotonic()

    job = start_job(f"max_steps={LAST}", faults={0: one.fault})
    struck = job.pids / "struck-0"
    wait_until(lambda: struck.exists() or not job.left(), 120, lambda: job.text)
    assert struck.exists(), f"{one.fault} was never reached:\n{job.text}"
    return job, float(struck.read_text())


def imported_by(to: str, job: Job, ranks: list[int]) -> list[int]:
    """Processes of a job whose ranks import."""
    chosen = {
        **{"rank 0": ranks[:1], "rank 1": ranks[1:], "ranks": ranks},
        **{"launcher": [job.process.pid], "job": job.left()},
    }
    return chosen[to]


def assert_gone(job: Job, since: float, seconds: float = SECONDS) -> float:
    """No process is left so many seconds after the signal; returns how many it took."""
    job.until_gone(max(0.1, since + seconds - time.monotonic()))
    return time.monotonic() - since


def assert_nothing_lost(job: Job, before: int) -> int:
    """The newest checkpoint is whole, and of the last step; returns that step."""
    queued = job.pids / "steps.jsonl"
    lines = queued.read_text().splitlines() if queued.exists() else []
    steps = [line["step"] for line in [*read_metrics(job.outputs), *map(json.loads, lines)]]
    last = max(steps, default=before)
    saved = newest_step(job.outputs)
    assert saved == last, f"lost: {last - saved} steps, the newest checkpoint is of {saved}"
    if newest := newest_checkpoint(job.outputs):
        verify(newest)
    return saved


def test_the_run_is_saved_and_gone(
    case: Case,
    config: Path,
    undisturbed: Undisturbed,
    tmp_path: Path,
    jobs: list[Job],
) -> None:
    one: Preemption = case.arguments
    wanted = undisturbed[2 // one.sp_size, one.sp_size]
    heldout = config.with_name("clips.csv")
    options = [f"sp_size={one.sp_size}", *OPTIONS, *one.options]
    options += [f"validation={{'every': 2, 'manifest': {str(heldout)!r}, 'bins': 1}}"]

    def start_job(*more: str, **how: Any) -> Job:
        kind = Job if "launcher" in how else ElasticJob
        jobs.append(kind(tmp_path, config, *options, *more, **how))
        return jobs[-1]

    if one.resumes:
        shutil.copytree(wanted / checkpoint_name(FIRST), tmp_path / "run" / checkpoint_name(FIRST))
    job, since = preempt(one, start_job)
    assert_gone(job, since)
    saved = assert_nothing_lost(job, FIRST if one.resumes else 0)

    for stop in (saved + 1, saved + 2):
        again = start_job(f"max_steps={stop}")
        assert again.process.wait(120) == 0, again.text
        again.until_gone(SECONDS)
        assert content_of(again.outputs, stop) == content_of(wanted, stop)
    # Of a run that began with a checkpoint, earlier steps are in the folder of another.
    logged = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert logged == list(range(logged[0], saved + 3)) and logged[0] in (1, FIRST + 1)
