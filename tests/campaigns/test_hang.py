"""A rank hangs, freezes, is cut off or lags: the others name it and its place, and end in time.

Each rank in turn, at each place of a run. Then the next two starts resume, and end with the bits of
a run without a fault. A rank that is slow and alive alarms nobody.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch.distributed as dist
from launched import LaunchedRanks
from restarts import TINY, content_of
from runs import write_training

from campaigns.case import Case, with_sample
from opensora_sp.checkpoint.writer import Saver
from opensora_sp.config import load_train_config
from opensora_sp.data.dataset import VideoTextDataset
from opensora_sp.runtime.rendezvous import Rendezvous
from opensora_sp.training import metrics, run
from opensora_sp.training.run import train
from opensora_sp.training.step import TrainingStep
from opensora_sp.training.trainer import Trainer
from opensora_sp.training.validation import Validator

# The function that a rank does not enter.
PLACES: dict[str, tuple[Any, str]] = {
    "joining": (Rendezvous, "join"),
    "the process group": (dist, "init_process_group"),
    "connecting": (Rendezvous, "connect"),
    "the start": (Trainer, "_build_model"),
    "reading": (VideoTextDataset, "_read"),
    "forward": (TrainingStep, "_forward_backward"),
    "the update": (TrainingStep, "_update"),
    "saving": (Saver, "_run"),
    "validation": (Validator, "_validate"),
    "the end": (run, "drain_process_group"),
}
FOREVER = 600.0
# Until the others have read a heartbeat with the place of a rank that is about to freeze.
SETTLED = 3.0
FREEZES: dict[str, Callable[[], Any]] = {
    "stop": partial(signal.raise_signal, signal.SIGSTOP),
    "hold the GIL": partial(ctypes.PyDLL(None).sleep, int(FOREVER)),
}


@dataclass(frozen=True)
class Hang:
    """What one rank does at a place.

    Attributes:
        kind: "stop" by SIGSTOP, "hold the GIL", so that no thread runs, "sleep" in Python, "raise"
            an error, "skip" the call, or "lag" behind the others in each call.
        call: which of the rank's calls at the place, counted from 1.
        in_worker: whether a worker of the rank's loader does so; its rank then waits for it.
    """

    kind: str
    place: str
    rank: int
    call: int = 1
    in_worker: bool = False

    def plant(self, struck: Path) -> None:
        """In a rank, which links ``struck`` to the time of its hang."""
        if int(os.environ["RANK"]) != self.rank:
            return
        owner, name = PLACES[self.place]
        plain, calls = getattr(owner, name), [0]

        # Calls no function of Python once it waits: heartbeats have the innermost frame.
        def hanging(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if self.kind == "lag":
                time.sleep(2.0)
            elif calls[0] == self.call:
                time.sleep(SETTLED if self.is_silent else 0)
                os.symlink(str(time.monotonic()), struck)
                FREEZES.get(self.kind, int)()
                if self.kind == "raise":
                    raise ValueError("got a planted error; expected none; remove it")
                if self.kind == "skip":
                    return None
                time.sleep(FOREVER)
            return plain(*args, **kwargs)

        # Stacks and reports show the name of the code.
        hanging.__code__ = hanging.__code__.replace(co_name=f"hangs in {self.place}")
        setattr(owner, name, hanging)

    @property
    def is_silent(self) -> bool:
        """Whether the rank sends no heartbeats."""
        return self.kind in ("stop", "hold the GIL")

    def named_by(self, other: int) -> re.Pattern[str]:
        """What another rank logs."""
        at = rf"\S+:\d+ \(hangs in {self.place}\)"
        if self.in_worker:
            at = r"\S+:\d+ \(\w+\)"
        stops = f"rank {other} stops: "

        if self.place == "joining":
            absent = f"expected all, but rank {self.rank} did not join"
            return re.compile(absent if self.rank else "got no response from rank 0 ")
        if self.place == "connecting":
            absent = f"expected all, but rank {self.rank} did not join"
            return re.compile(absent if self.rank else f"{absent}|got no response from the store")
        late = rf"got no process group of \d ranks within \S+ s: .*rank {self.rank} at {at}"
        if self.place == "the process group" and not self.is_silent:
            return re.compile(f"{stops}{late}")
        if self.kind == "raise":
            return re.compile(f"{stops}rank {self.rank} failed: ValueError: got a planted error")
        if not self.is_silent:
            return re.compile(
                rf"{stops}rank \d has waited \S+ s \(collective_timeout\) for .* missing: "
                rf"(.*; )?rank {self.rank}, which has called \d+ and is at {at}"
            )
        if self.rank == 0 and self.kind == "stop":
            # A thread of torch's, which needs no GIL, serves the store.
            return re.compile(
                rf"{stops}({late}|rank 0, which hosts the store of the heartbeats, has exited, is "
                rf"stopped or is cut off \(.*\); it was at {at})"
            )
        return re.compile(
            rf"{stops}({late}|rank {self.rank} has sent no heartbeat for \S+ s \(peer_timeout\); "
            rf"it was at {at})"
        )

    def skip_named_by(self, other: int) -> re.Pattern[str]:
        """What another rank logs where the rank has skipped a collective."""
        return re.compile(
            rf"rank {other} stops: (rank {self.rank} has waited .* missing: |"
            rf".*missing: (.*; )?rank {self.rank}, which has called \d+ and is at |"
            rf".*, or ranks have called another collective: rank {self.rank} is at )"
        )


def trained(config: Path, options: list[str], hang: Hang | None = None, struck: Any = None) -> None:
    """Train in this rank, with a fault if there is one."""
    metrics.draw_loss = lambda run_dir: None
    if hang is not None:
        hang.plant(struck)
    train(load_train_config(config, options), resume="auto")


pytestmark = [
    pytest.mark.campaign(bar="right rank and place named within the timeout + 5 s", size=120),
    pytest.mark.serial,  # it measures seconds
]

MARGIN = 5.0  # seconds after the timeout in which the others name the rank
EXIT = 6.0  # seconds after that in which they end
JOIN_TIMEOUT = 5.0
PEER_TIMEOUT, COLLECTIVE_TIMEOUT = 5.0, 4.0
LATER = 60.0  # the timeout that is not tested
RANKS, STEPS = 3, 4
SMALL = [*TINY, "ckpt_every=2", "micro_batches_per_step=1"]
BEFORE_THE_RUN = ("joining", "connecting", "the process group")
AFTER_THE_WATCHDOG = [place for place in PLACES if place not in BEFORE_THE_RUN]


@dataclass(frozen=True)
class Setup:
    """How the ranks train while one of them hangs.

    Attributes:
        timeout: which timeout comes first, "peer" or "collective".
    """

    hangs: tuple[Hang, ...]
    timeout: str = "collective"
    options: tuple[str, ...] = ()

    def seconds(self, hang: Hang) -> float:
        """The timeout that is tested."""
        if hang.place in BEFORE_THE_RUN:
            return JOIN_TIMEOUT
        return PEER_TIMEOUT if self.timeout == "peer" else COLLECTIVE_TIMEOUT

    def timeouts(self) -> list[str]:
        is_peer = self.timeout == "peer"
        peer, collective = (PEER_TIMEOUT, LATER) if is_peer else (LATER, COLLECTIVE_TIMEOUT)
        return [f"peer_timeout={peer}", f"collective_timeout={collective}"]


def cases(random: Random) -> list[Case]:
    """Three ranks at a time, at each place; which timeout, layout and step, the seed decides."""
    drawn: list[Case] = []

    def add(kind: str, place: str, **options: Any) -> None:
        calls = {"forward": STEPS, "reading": STEPS, "the update": STEPS, "saving": 2}
        call = random.randint(1, calls.get(place, 1))
        in_worker = options.pop("in_worker", False)
        group = [Hang(kind, place, rank, call, in_worker) for rank in range(RANKS)]
        drawn_options = tuple(layout(random, place))
        setup = Setup(tuple(group), **{"options": drawn_options, **options})
        name = f"{kind} {'in a worker ' * in_worker}at {place}"
        name += " in the background" * ("async_save=True" in setup.options)
        drawn.append(Case(name, setup, trials=RANKS))

    for place in PLACES:
        add("stop", place, timeout="peer")
        add("sleep", place)
    for place in random.sample(AFTER_THE_WATCHDOG, 6):
        add("hold the GIL", place, timeout="peer")
    for place in ("saving", "validation"):
        add("skip", place, timeout="collective")
        add("skip", place, timeout="collective", options=("sp_size=1", "async_save=True"))
    for place in random.sample(list(PLACES), 6):
        add("lag", place)
    for place in random.sample(AFTER_THE_WATCHDOG, 3):
        add("raise", place)
    add("sleep", "reading", in_worker=True)

    several = [
        Hang("stop", "the update", 0, call=2),
        Hang("stop", "connecting", 1),
        Hang("sleep", "the process group", 2),
    ]
    setup = Setup(tuple(several), timeout="peer", options=("sp_size=3", "precision=fp32"))
    drawn.append(Case("several, one on each rank", setup, trials=RANKS))
    return with_sample(drawn, ["several, one on each rank"])


def layout(random: Random, place: str) -> list[str]:
    options = random.choice([["sp_size=3"], ["sp_size=1", f"micro_batches_per_step={RANKS}"]])
    options = [*options, random.choice(["precision=fp32", "precision=bf16"])]
    if place == "reading":
        options.append("dataset.time_limit=600")
    return options


@dataclass
class Ground:
    """Where the trainings of this file run, and what they end with without a fault."""

    config: Path
    root: Path
    heldout: str
    _whole: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def options(self, outputs: Path, setup: Setup, hang: Hang) -> list[str]:
        workers = [f"num_workers={int(hang.in_worker)}"]
        if hang.place == "validation":
            workers.append(f"validation={{'every': 2, 'manifest': {self.heldout!r}}}")
        limits = setup.timeouts()
        return [f"outputs={outputs}", *SMALL, *setup.options, *limits, *workers]

    def whole(self, setup: Setup) -> Path:
        """A run of the same layout without a fault."""
        if setup.options not in self._whole:
            folder = self.root / "whole" / " ".join(setup.options)
            options = [f"outputs={folder}", *SMALL, *setup.options, f"max_steps={STEPS + 2}"]
            run_to_its_end(folder.with_name(f"logs {folder.name}"), self.config, options, {})
            self._whole[setup.options] = folder
        return self._whole[setup.options]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    folder = tmp_path_factory.mktemp("hang")
    config = write_training(folder / "set", 12)
    return Ground(config, folder, str(folder / "set" / "clips.csv"))


def test_others_name_the_rank_and_its_place_and_the_next_starts_resume(
    case: Case,
    ground: Ground,
    tmp_path: Path,
) -> None:
    setup = case.arguments
    ground.whole(setup)
    with ThreadPoolExecutor(RANKS) as pool:
        tasks = [(setup, hang, tmp_path / f"rank {hang.rank}") for hang in setup.hangs]
        list(pool.map(lambda task: check(ground, *task), tasks))


def check(ground: Ground, setup: Setup, hang: Hang, folder: Path) -> None:
    """One hang and the next two starts."""
    options = ground.options(folder / "run", setup, hang)
    how: dict[str, Any] = {"environment": {"OPENSORA_SP_JOIN_TIMEOUT": str(JOIN_TIMEOUT)}}

    if hang.kind == "lag":
        run_to_its_end(folder / "logs", ground.config, [*options, f"max_steps={STEPS}"], how, hang)
        assert_same(folder / "run", ground.whole(setup), STEPS)
    else:
        await_named(ground, setup, hang, folder, options, how)

    for steps in (STEPS, STEPS + 2):
        run_to_its_end(folder / f"to {steps}", ground.config, [*options, f"max_steps={steps}"], how)
        assert_same(folder / "run", ground.whole(setup), steps)


def await_named(
    ground: Ground,
    setup: Setup,
    hang: Hang,
    folder: Path,
    options: list[str],
    how: dict[str, Any],
) -> None:
    """Wait until all others have named the rank and ended."""
    struck = folder / "struck"
    more = [*options, f"max_steps={STEPS}"]
    ranks = LaunchedRanks(folder / "logs", RANKS, trained, ground.config, more, hang, struck, **how)
    try:
        ranks.await_link(struck)
        others = [rank for rank in range(RANKS) if rank != hang.rank]
        ranks.await_lines(expected(setup, hang, others), setup.seconds(hang) + MARGIN)
        ranks.await_end(others, EXIT)
        assert all(ranks.processes[rank].exitcode in (1, 2) for rank in others), ranks.texts()
    finally:
        ranks.kill()


def expected(setup: Setup, hang: Hang, others: list[int]) -> dict[int, Any]:
    """By rank, what it logs."""
    if hang.kind == "skip":
        return {rank: hang.skip_named_by(rank) for rank in others}
    return {rank: hang.named_by(rank) for rank in others}


def run_to_its_end(
    logs: Path, config: Path, options: list[str], how: dict[str, Any], hang: Hang | None = None
) -> None:
    """Train without an alarm."""
    ranks = LaunchedRanks(logs, RANKS, trained, config, options, hang, logs / "struck", **how)
    try:
        ranks.await_end(range(RANKS), 120)
        assert [process.exitcode for process in ranks.processes] == [0] * RANKS, ranks.texts()
        assert " stops: " not in ranks.texts()
    finally:
        ranks.kill()


def assert_same(run_dir: Path, whole: Path, step: int) -> None:
    """The checkpoint of a step has the bits of the other run's."""
    assert content_of(run_dir, step) == content_of(whole, step), f"step {step} differs"
