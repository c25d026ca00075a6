"""SIGKILL of a rank, of all, of the launcher or of a loader's worker, at any moment of a run.

A run resumes at the checkpoint of step 2, or starts anew, and is killed before the checkpoint of
step 6. Its launcher does not end the ranks that are left, as those of other nodes do not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch.distributed as dist
from launched import WarmJob
from moments import Moment
from restarts import (
    EVERY,
    STEPS,
    VALIDATION,
    Layout,
    Undisturbed,
    assert_starts_continue,
    newest_step,
    train_once,
)
from runs import write_toy_set, write_training

from campaigns.case import Case

pytestmark = pytest.mark.campaign(
    bar="the newest committed checkpoint is resumed, nothing is torn, no process after 15 s, and "
    "0 bits differ in the next two starts",
    size=250,
)
SECONDS = 15.0  # in which all processes of a run end

TRAINER, RUN = "opensora_sp.training.trainer:", "opensora_sp.training.run:"
STEP = "opensora_sp.training.step:"
METRICS, SAMPLING = "opensora_sp.training.metrics:", "opensora_sp.sampling."
VALIDATOR = "opensora_sp.training.validation:"
# By phase: calls that each rank makes, and how often it makes them from step 3 on.
CALLS = {
    "start": {
        "opensora_sp.runtime.watchdog:Watchdog.__enter__": 1,
        f"{RUN}_open_run_dir": 1,
        f"{RUN}agree_on_clips": 1,
        f"{RUN}choose_checkpoint": 1,
        f"{TRAINER}Trainer._build_model": 1,
        f"{TRAINER}Trainer._restore": 1,
        f"{TRAINER}Trainer._build_data_path": 1,
        f"{METRICS}Reporter.__init__": 1,
    },
    "data": {
        "opensora_sp.data.dataset:VideoTextDataset._read": 4,
        "opensora_sp.features.sharded:ShardedEncoder.encode": 4,
        "opensora_sp.features.batch:BatchMaker.make": 4,
    },
    "step": {
        f"{STEP}TrainingStep._forward_backward": 4,
        f"{STEP}rank_loss": 4,
        f"{STEP}TrainingStep._update": 4,
        "opensora_sp.plugin.zero_optimizer:SequenceZeroOptimizer.step_if_finite": 4,
        "opensora_sp.training.trainable:ShardedEma.update": 4,
        "opensora_sp.training.step:PendingResult.read": 4,
        f"{METRICS}Reporter.log": 4,
    },
    "validation": {
        f"{VALIDATOR}Validator._validate": 1,
        f"{VALIDATOR}ema_weights": 1,
        f"{SAMPLING}pipeline:Pipeline.looped": 1,
        f"{VALIDATOR}write_batch": 1,
        f"{VALIDATOR}Validator._heldout_losses": 1,
        f"{METRICS}Reporter.validated": 1,
    },
}
# Calls that rank 0 alone makes.
OF_RANK_0 = {
    "start": ["opensora_sp.runtime.run_lock:RunLock.__enter__", f"{METRICS}drop_after"],
    "step": [f"{METRICS}append_line"],
    "validation": [f"{SAMPLING}outputs:Output.finish", f"{METRICS}Reporter._show"],
}
# What rank 0 does to files while it saves, and how often.
FILES = ("model/model.safetensors", "ema/model.safetensors", "optimizer.safetensors")
OPERATIONS = {
    "mkdir .partial-{new}": 1,
    "mkdir .partial-{new}/model": 2,
    **{f"write .partial-{{new}}/{file}": 20 for file in FILES},
    **{f"flush .partial-{{new}}/{file}": 1 for file in FILES},
    "write .partial-{new}/state.json": 1,
    "flush .partial-{new}/state.json": 1,
    "write .partial-{new}/manifest.json": 1,
    "flush .partial-{new}/manifest.json": 1,
    "flush .partial-{new}/ema": 1,
    "flush .partial-{new}": 1,
    "rename .partial-{new}": 1,
    "flush .": 2,
    "write {new}/.partial-COMMIT": 1,
    "flush {new}/.partial-COMMIT": 1,
    "rename {new}/.partial-COMMIT": 1,
    "flush {new}": 1,
    "write .partial-latest": 1,
    "rename .partial-latest": 1,
    "unlink {old}/COMMIT": 1,
    "flush {old}": 1,
    "unlink {old}/model/model.safetensors": 1,
    "unlink {old}/manifest.json": 1,
    "unlink {old}": 1,
}
MOMENTS_OF_SAVES = []
for what in OPERATIONS:
    inside = ["within"] if what.startswith("write") else []
    MOMENTS_OF_SAVES += [(what, when) for when in ["before", *inside, "after"]]
LAYOUTS: list[Layout] = [(1, 2), (2, 1), (1, 2), (2, 1), (1, 1), (2, 2)]
PER_PHASE = {"save": 80, "start": 42, "data": 42, "step": 42, "validation": 42}


@dataclass(frozen=True)
class Kill:
    """Where a run is killed.

    Attributes:
        victim: "rank 1", "all", "launcher", or "worker" of a loader.
        by: the rank whose call or operation is the moment.
        is_new: whether the run starts from step 0.
    """

    phase: str
    moment: Moment
    victim: str
    by: int
    layout: Layout = (1, 2)
    is_new: bool = False
    async_save: bool = False
    num_workers: int = 0

    @property
    def name(self) -> str:
        moment, (dp, sp) = self.moment, self.layout
        what = moment.what.rpartition(":")[2].replace("{", "").replace("}", "")
        options = " new" * self.is_new + " async" * self.async_save + " worker" * self.num_workers
        where = f"{self.phase}: {moment.when} {what} {moment.number} of rank {self.by}"
        return f"{self.victim} in {where} dp{dp} sp{sp}{options}".replace("/", "-")

    def is_named_in(self, log: str) -> bool:
        """Whether another rank logs which one was killed, once there is a watchdog."""
        if not self.victim.startswith("rank") or self.phase == "start" or self.layout == (1, 1):
            return True
        number = self.victim.removeprefix("rank ")
        return re.search(rf"stops: (rank {number}\b|ranks \[{number}\])", log) is not None


def victims_of(layout: Layout) -> list[str]:
    ranks = [f"rank {rank}" for rank in range(layout[0] * layout[1])]
    return [*ranks, "all", "launcher"]


def draw(random: Random, phase: str, number: int) -> Kill:
    """A kill in this phase; layouts and victims take turns."""
    layout = LAYOUTS[number % len(LAYOUTS)]
    victims = victims_of(layout)
    victim = victims[number // len(LAYOUTS) % len(victims)]
    by = int(victim.removeprefix("rank ")) if victim.startswith("rank") else 0
    when = random.choice(["before", "after"])
    num_workers = random.choice([0, 1] if phase == "data" else [0, 0, 0, 1])

    if phase == "save":
        # Each of them in turn, so that none is left out.
        what, when = MOMENTS_OF_SAVES[number % len(MOMENTS_OF_SAVES)]
        by, calls = 0, OPERATIONS[what]
    elif by == 0 and random.random() < 0.3 and phase in OF_RANK_0:
        what, calls = random.choice(OF_RANK_0[phase]), 1
    else:
        what = random.choice(list(CALLS[phase]))
        calls = CALLS[phase][what]
    if phase == "data" and num_workers:
        # A call of the worker.
        what = "opensora_sp.data.dataset:VideoTextDataset._read"
        victim = random.choice([victim, "worker"])

    return Kill(
        phase,
        Moment(what, when, random.randrange(calls)),
        victim,
        by,
        layout,
        is_new=random.random() < 0.3,
        async_save=random.random() < 0.4,
        num_workers=num_workers,
    )


COMMIT = Moment("rename {new}/.partial-COMMIT")
SAMPLE = [
    Kill("save", COMMIT, "rank 0", 0),
    Kill("start", Moment(f"{TRAINER}Trainer._restore"), "rank 1", 1),
    Kill("step", Moment(f"{STEP}TrainingStep._update", number=2), "launcher", 0),
]


def cases(random: Random) -> list[Case]:
    kills = dict.fromkeys(SAMPLE)
    for phase, size in PER_PHASE.items():
        drawn: set[Kill] = set()
        number = 0
        while len(drawn) < size:
            kill, number = draw(random, phase, number), number + 1
            if kill not in kills:
                kills[kill] = None
                drawn.add(kill)
    return [Case(kill.name, kill, in_sample=kill in SAMPLE) for kill in kills]


@dataclass(frozen=True)
class Strike:
    """Notes the time and the newest checkpoint, and kills."""

    outputs: Path
    note: Path
    victims: tuple[int, ...]

    def __call__(self) -> None:
        text = json.dumps([time.time(), newest_step(self.outputs)])
        self.note.with_suffix(".partial").write_text(text)
        self.note.with_suffix(".partial").rename(self.note)
        for pid in self.victims:
            os.kill(pid, signal.SIGKILL)


def train_and_kill(config: Path, outputs: Path, kill: Kill, options: list[str]) -> str:
    """Plant the kill in the rank that makes the call, and train."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == kill.by:
        # This process last: nothing is done after that.
        everyone = sorted(pids, key=lambda pid: pid == os.getpid())
        victims = {f"rank {rank}": [pid] for rank, pid in enumerate(pids)}
        victims |= {"all": everyone, "launcher": [os.getppid()], "worker": []}
        strike = Strike(outputs, outputs.with_name("struck"), tuple(victims[kill.victim]))

        def act() -> None:
            strike()
            if kill.victim == "worker":
                os.kill(os.getpid(), signal.SIGKILL)

        kill.moment.plant(act)
    return train_once(config, outputs, kill.layout, STEPS, *options)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    write_toy_set(folder / "held", 3)
    return write_training(folder, 8)


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(config, tmp_path_factory.mktemp("undisturbed"))


class Scene:
    """Where a case takes place: a folder, a config, and the runs to compare with."""

    def __init__(self, config: Path, folder: Path, undisturbed: Undisturbed) -> None:
        self.config, self.folder, self.undisturbed = config, folder, undisturbed
        self.outputs = folder / "run"

    def run(self, kill: Kill) -> None:
        """Kill a run, and wait until all of its processes have ended."""
        if not kill.is_new:
            checkpoint = self.undisturbed[kill.layout] / "step_00000002"
            shutil.copytree(checkpoint, self.outputs / checkpoint.name)
        work = (train_and_kill, self.config, self.outputs, kill, self.options(kill))
        job = WarmJob(self.folder / "killed", kill.layout[0] * kill.layout[1], *work)
        try:
            job.until(self.folder / "struck", 60)
            struck, _ = json.loads((self.folder / "struck").read_text())
            job.wait(struck + SECONDS - time.time())
        finally:
            job.kill()
        assert kill.is_named_in(job.text), f"nobody names {kill.victim}:\n{job.text}"

    def options(self, kill: Kill) -> list[str]:
        options = [f"ckpt_every={EVERY}", "keep_last=1", f"num_workers={kill.num_workers}"]
        options += [f"async_save={kill.async_save}"]
        if kill.phase == "validation":
            held = self.config.with_name("held") / "clips.csv"
            options += [f"validation.{option}" for option in [*VALIDATION, f"manifest={held}"]]
        return options

    def check(self, layout: Layout) -> None:
        """What was committed at the kill is left, and the next starts continue from the newest."""
        note = self.folder / "struck"
        newest = json.loads(note.read_text())[1] if note.exists() else 0
        found = newest_step(self.outputs)
        assert found >= newest, f"step {newest} was committed, and step {found} is left"
        whole = self.undisturbed[layout]
        assert_starts_continue(self.config, self.folder, self.outputs, layout, whole)


@pytest.fixture
def scene(config: Path, undisturbed: Undisturbed, tmp_path: Path) -> Scene:
    return Scene(config, tmp_path, undisturbed)


def test_a_killed_run_loses_nothing(case: Case, scene: Scene) -> None:
    kill: Kill = case.arguments
    scene.run(kill)
    scene.check(kill.layout)
