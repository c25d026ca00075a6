"""Faults of the disk at any moment of a run, and two runs in one folder.

A run resumes at the checkpoint of step 2, on a small disk of its own, which fails before the
checkpoint of step 6; either for good, or only while nothing is saved.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any

import av
import pytest
import torch.distributed as dist
from launched import WarmJob
from moments import Moment
from own_disk import fill, make_read_only, make_room, make_writable, with_own_disk
from polling import wait_until
from restarts import (
    EVERY,
    STEPS,
    VALIDATION,
    Layout,
    Undisturbed,
    assert_nothing_torn,
    assert_starts_continue,
    newest_step,
    train_once,
)

from campaigns.case import Case

SLOW_FSYNC = 0.15  # seconds


def begin(kind: str, run_dir: Path) -> None:
    """Let the fault begin: "full", "read-only", "EIO", "slow fsync", "removed" or "moved"."""
    if kind == "full":
        fill(run_dir.parent)
    elif kind == "read-only":
        make_read_only(run_dir)
    elif kind == "removed":
        shutil.rmtree(run_dir, ignore_errors=True)
    elif kind == "moved":
        run_dir.rename(run_dir.with_name("moved"))
    else:
        run_dir.with_name(kind).touch()


def end(kind: str, run_dir: Path) -> None:
    """Mend the disk; what was removed or moved stays so."""
    if kind == "full":
        make_room(run_dir.parent)
    elif kind == "read-only":
        make_writable(run_dir)
    elif kind not in ("removed", "moved"):
        run_dir.with_name(kind).unlink()


def plant_switches(run_dir: Path) -> None:
    """For each rank: EIO of whatever changes the folder, and fsync that takes long."""
    slow, broken = run_dir.with_name("slow fsync"), run_dir.with_name("EIO")

    def is_in_run(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(run_dir)

    def failing(plain: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        @wraps(plain)
        def call(path: Any, *args: Any, **how: Any) -> Any:
            if is_in_run(path) and broken.exists() and writes(*args, **how):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return plain(path, *args, **how)

        return call

    def opens_to_write(mode: str = "r", *args: Any, **how: Any) -> bool:
        return not mode.startswith("r") or "+" in mode

    def fsync(descriptor: int) -> None:
        if slow.exists():
            time.sleep(SLOW_FSYNC)
        if broken.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        plain_fsync(descriptor)

    plain_fsync, os.fsync = os.fsync, fsync
    io.open = builtins.open = failing(io.open, opens_to_write)
    av.open = failing(av.open, opens_to_write)
    for name in ("replace", "rename", "link", "mkdir", "unlink", "rmdir"):
        setattr(os, name, failing(getattr(os, name), lambda *args, **how: True))


pytestmark = pytest.mark.campaign(
    bar="the last committed checkpoint is never harmed, an error by the next save at the latest, "
    "and 0 bits differ in the next two starts",
    size=60,
)
MEGABYTES = 8
STEPS_OF_RUN, METRICS = "opensora_sp.training.step:", "opensora_sp.training.metrics:"
# By phase: the calls at which a fault begins, and those at which one ends that passes.
BEGIN: dict[str, list[str]] = {
    "start": [
        "opensora_sp.runtime.watchdog:Watchdog.__enter__",
        "opensora_sp.runtime.run_lock:RunLock.__enter__",
        "opensora_sp.training.run:_open_run_dir",
        "opensora_sp.training.run:choose_checkpoint",
        f"{METRICS}Reporter.__init__",
    ],
    "metrics": [f"{METRICS}Reporter.log", f"{METRICS}append_line"],
    "log": [f"{METRICS}log_line", "opensora_sp.training.step:DelayedResults.settle"],
    "videos": [
        "opensora_sp.training.validation:write_batch",
        "opensora_sp.sampling.pipeline:Pipeline.looped",
        "opensora_sp.sampling.outputs:Output.finish",
    ],
    "save": [
        "mkdir .partial-{new}/model",
        "write .partial-{new}/model/model.safetensors",
        "write .partial-{new}/optimizer.safetensors",
        "flush .partial-{new}/optimizer.safetensors",
        "write .partial-{new}/state.json",
        "write .partial-{new}/manifest.json",
        "flush .partial-{new}",
        "rename .partial-{new}",
        "write {new}/.partial-COMMIT",
        "rename {new}/.partial-COMMIT",
        "write .partial-latest",
        "unlink {old}/COMMIT",
        "unlink {old}/model/model.safetensors",
    ],
}
END = {
    "start": f"{STEPS_OF_RUN}TrainingStep.run",
    "metrics": f"{STEPS_OF_RUN}TrainingStep.run",
    "log": f"{STEPS_OF_RUN}TrainingStep.run",
    "videos": f"{METRICS}Reporter.validated",
}
KINDS = ["full", "EIO", "read-only", "slow fsync", "removed", "moved"]
LAYOUTS: list[Layout] = [(1, 2), (2, 1), (1, 1)]
WARNING = "validation/ is incomplete from here on"


@dataclass(frozen=True)
class Fault:
    """A fault of the disk that begins at a call, or a save's operation, of rank ``by``.

    Attributes:
        passes: whether it ends before the next save.
    """

    kind: str
    phase: str
    moment: Moment
    by: int = 0
    passes: bool = False
    layout: Layout = (1, 2)
    async_save: bool = False

    @property
    def name(self) -> str:
        moment, (dp, sp) = self.moment, self.layout
        what = moment.what.rpartition(":")[2].replace("{", "").replace("}", "")
        options = " passes" * self.passes + " async" * self.async_save
        where = f"{self.phase}: {moment.when} {what} {moment.number} of rank {self.by}"
        return f"{self.kind} in {where} dp{dp} sp{sp}{options}".replace("/", "-")


@dataclass(frozen=True)
class TwoRuns:
    """A second run is started in the folder of one that waits at a moment of rank 0.

    Attributes:
        kind: "refused"; "after SIGKILL" of the first; or "at once", where neither waits.
    """

    kind: str
    moment: Moment
    layout: Layout = (1, 2)

    @property
    def name(self) -> str:
        what, (dp, sp) = self.moment.what.rpartition(":")[2], self.layout
        what = what.replace("{", "").replace("}", "").replace("/", "-")
        return f"two runs {self.kind}: {what} dp{dp} sp{sp}"


def draw(random: Random, kind: str, phase: str, number: int) -> Fault:
    """A fault of this kind and phase; layouts take turns."""
    layout = LAYOUTS[number % len(LAYOUTS)]
    what = random.choice(BEGIN[phase])
    passes = phase in END and kind in ("full", "EIO", "read-only") and random.random() < 0.5
    async_save = random.random() < 0.4
    # Of steps 3 to 6, the saves are at 4 and 6; step 5 runs while an asynchronous one is written.
    steps = [0, 1, 2]
    if passes:
        steps = [0] if async_save else [0, 2]
    at_step = random.choice(steps) if phase in ("metrics", "log") else 0
    calls = at_step
    if what.endswith("append_line"):
        # One for the session; then one a step, and one more where there are other ranks.
        calls = 1 + at_step * (1 if layout == (1, 1) else 2)
    of_rank_0 = what.endswith(("RunLock.__enter__", "log_line", "append_line", "Output.finish"))
    is_first = phase == "save" or of_rank_0
    return Fault(
        kind,
        phase,
        Moment(what, number=calls),
        by=0 if is_first else random.randrange(layout[0] * layout[1]),
        passes=passes,
        layout=layout,
        async_save=async_save,
    )


VIDEOS = Moment("opensora_sp.training.validation:write_batch")
STEP = Moment(f"{STEPS_OF_RUN}TrainingStep._update", number=1)
SAMPLE = [
    Fault("full", "videos", VIDEOS, by=1, passes=True),
    Fault("EIO", "save", Moment("flush .partial-{new}/optimizer.safetensors"), async_save=True),
    TwoRuns("refused", STEP),
]
SAVE = Moment("write .partial-{new}/optimizer.safetensors")
TWO_RUNS = [TwoRuns("at once", STEP), TwoRuns("at once", STEP, (2, 1))]
for moment in (Moment("opensora_sp.training.run:choose_checkpoint"), STEP, SAVE, VIDEOS):
    TWO_RUNS += [TwoRuns("refused", moment, (2, 1)), TwoRuns("after SIGKILL", moment)]


def cases(random: Random) -> list[Case]:
    faults = dict.fromkeys([*SAMPLE, *TWO_RUNS])
    for kind in KINDS:
        for phase in BEGIN:
            number, wanted = 0, len(faults) + (3 if phase == "save" else 2)
            while len(faults) < wanted:
                fault, number = draw(random, kind, phase, number), number + 1
                faults[fault] = None
    return [Case(fault.name, fault, in_sample=fault in SAMPLE) for fault in faults]


def train_on(config: Path, outputs: Path, fault: Fault) -> list:
    """Plant the fault, and train; returns the error and the last step that was begun."""
    from opensora_sp.training.step import TrainingStep

    plant_switches(outputs)
    begun, plain = [EVERY], TrainingStep.run

    def step(self: TrainingStep, number: int, *args: Any) -> Any:
        begun[0] = number + 1
        return plain(self, number, *args)

    def act() -> None:
        note = [begun[0], newest_step(outputs)]
        outputs.with_name("struck").write_text(json.dumps(note))
        begin(fault.kind, outputs)
        if fault.passes:
            Moment(END[fault.phase]).plant(mend)

    def mend() -> None:
        end(fault.kind, outputs)
        outputs.with_name("mended").touch()

    TrainingStep.run = step
    if dist.get_rank() == fault.by:
        fault.moment.plant(act)
    options = [f"ckpt_every={EVERY}", "keep_last=1", f"async_save={fault.async_save}"]
    if fault.phase == "videos":
        options += [f"validation.{option}" for option in VALIDATION]
    try:
        error = train_once(config, outputs, fault.layout, STEPS, *options)
    except (Exception, SystemExit) as other:
        error = f"{type(other).__name__}: {other}"
    return [error, begun[0]]


class Disk:
    """Where a case takes place, in a process with a disk of its own."""

    def __init__(self, config: Path, folder: Path, whole: Path, layout: Layout) -> None:
        self.config, self.folder, self.whole, self.layout = config, folder, whole, layout
        self.outputs = folder / "disk" / "run"
        self.context = multiprocessing.get_context("fork")
        checkpoint = whole / "step_00000002"
        shutil.copytree(checkpoint, self.outputs / checkpoint.name)

    def start(self, name: str, function: Callable[..., Any], *args: Any) -> WarmJob:
        size = self.layout[0] * self.layout[1]
        work = (function, self.config, self.outputs, *args)
        return WarmJob(self.folder / name, size, *work, context=self.context)

    def run(self, fault: Fault) -> None:
        """Train on the disk while it fails; check how that ends."""
        job = self.start("failing", train_on, fault)
        try:
            job.wait(60)
        finally:
            job.kill()
        note = self.outputs.with_name("struck")
        assert note.exists(), f"the fault never began:\n{job.text}"
        step, newest = json.loads(note.read_text())

        # A rank that its watchdog ends returns nothing.
        outcomes = [job.outcome(rank) or (None, ["ended by the watchdog", 0]) for rank in job.ranks]
        errors = [traceback or value[0] for traceback, value in outcomes]
        last = max(value[1] for _, value in outcomes if value is not None)
        self.check_errors(fault, errors, last, step, job.text)

        # One that passes is still there where it has ended the run before.
        if not self.outputs.with_name("mended").exists():
            end(fault.kind, self.outputs)
        self.check_folders(fault, newest)

    def check_errors(self, fault: Fault, errors: list[str], last: int, step: int, log: str) -> None:
        """An error on all ranks by the next save, unless none is to be expected."""
        assert all(errors) or not any(errors), f"not on all ranks: {errors}\n{log}"
        for line in ("metrics.jsonl", "TensorBoard", "train.log", "validation/"):
            found = [text for text in log.splitlines() if f"{line} is incomplete" in text]
            assert len(found) <= 1, f"{len(found)} warnings of {line}:\n{log}"

        if fault.kind == "slow fsync" or (fault.passes and fault.phase != "start"):
            assert not any(errors), f"{errors}\n{log}"
            is_seen = fault.phase == "videos" and fault.kind != "slow fsync"
            assert not is_seen or log.count(WARNING) == 1, f"expected a warning of videos:\n{log}"
        elif fault.kind in ("full", "EIO", "read-only") and not fault.passes:
            assert all(errors), f"no error of a disk that fails\n{log}"
            # In the save of this step or the one after it; one later where it is asynchronous.
            limit = step + EVERY * (2 if fault.async_save else 1)
            assert last <= limit, f"trained to step {last} on a disk that fails from step {step}"

    def check_folders(self, fault: Fault, newest: int) -> None:
        """What was committed is whole, wherever it is now."""
        moved = self.outputs.with_name("moved")
        kept = moved if fault.kind == "moved" else self.outputs
        found = assert_nothing_torn(kept, self.whole)
        if fault.kind != "removed":
            assert found >= newest, f"step {newest} was committed, and step {found} is left"

    def start_again(self) -> None:
        assert_starts_continue(
            self.config, self.folder, self.outputs, self.layout, self.whole, context=self.context
        )


def hold(fault: Fault, *place: Any) -> None:
    disk = Disk(*place, fault.layout)
    disk.run(fault)
    disk.start_again()


def train_and_wait(config: Path, outputs: Path, two_runs: TwoRuns) -> str:
    """The first run: it waits for the second one."""
    disk = outputs.parent

    def wait() -> None:
        (disk / "waits").touch()
        wait_until((disk / "go").exists, 60)

    if dist.get_rank() == 0:
        two_runs.moment.plant(wait)
    return train_second(config, outputs, two_runs)


def train_second(config: Path, outputs: Path, two_runs: TwoRuns) -> str:
    from opensora_sp.runtime import run_lock

    run_lock.LOCAL_WAIT = 1.0
    options = [f"validation.{option}" for option in VALIDATION] + [f"ckpt_every={EVERY}"]
    return train_once(config, outputs, two_runs.layout, STEPS, *options)


def hold_two_runs(two_runs: TwoRuns, *place: Any) -> None:
    disk = Disk(*place, two_runs.layout)
    first = disk.start("first", train_and_wait, two_runs)
    is_at_once = two_runs.kind == "at once"
    if is_at_once:
        disk.outputs.with_name("go").touch()
    else:
        first.until(disk.outputs.with_name("waits"), 60)
    if two_runs.kind == "after SIGKILL":
        first.kill()
        return disk.start_again()

    second = disk.start("second", train_second, two_runs)
    try:
        errors = second.results(60)
        disk.outputs.with_name("go").touch()
        others = first.results(60)
    finally:
        first.kill()
        second.kill()

    refused, resumed = (errors, others) if not any(others) else (others, errors)
    assert not any(resumed), f"{resumed}\n{first.text}\n{second.text}"
    assert len(set(refused)) == 1, f"not the same error on all ranks: {refused}"
    # Where both start at once, the first may end while the second waits for it.
    if refused[0] or not is_at_once:
        holder = f"of {os.uname().nodename} since 2"
        assert "expected one run for each folder" in refused[0] and holder in refused[0], refused
    assert newest_step(disk.outputs) == STEPS
    disk.start_again()


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(config, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def on_a_disk(config: Path, undisturbed: Undisturbed, tmp_path: Path) -> Callable[..., None]:
    """Calls a function with the place of a case, in a process with a disk of its own."""

    def call(function: Callable[..., None], layout: Layout, *args: Any) -> None:
        place = (config, tmp_path, undisturbed[layout])
        try:
            with_own_disk(tmp_path / "disk", MEGABYTES, function, *args, *place)
        except PermissionError as error:
            pytest.skip(str(error))

    return call


def test_a_failing_disk_harms_nothing(case: Case, on_a_disk: Callable[..., None]) -> None:
    fault = case.arguments
    if isinstance(fault, TwoRuns):
        on_a_disk(hold_two_runs, fault.layout, fault)
    else:
        on_a_disk(hold, fault.layout, fault)
