"""Damaged bytes: bits flipped, blocks zeroed, files cut, extended, swapped or removed.

Each trial damages files of a run's checkpoints. What was written is either read as it was, or
refused with the file's name. Nothing else may change: no file but for the rename to ``*.damaged``.
The start after it does the same.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from damage import KINDS, content, damage
from ranks import run_ranks
from runs import write_training

from campaigns.case import Case, with_sample
from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.paths import checkpoint_name
from opensora_sp.config import load_train_config
from opensora_sp.training.checkpointing import choose_checkpoint, find_checkpoint

pytestmark = pytest.mark.campaign(
    bar="refused before anything changes, the file named; so does the next start", size=400
)

RANKS, STEPS = 2, (1, 2, 3)
LAST = checkpoint_name(4)
CHECKPOINT_FILES = (
    "COMMIT",
    "manifest.json",
    "state.json",
    "optimizer.safetensors",
    "model/config.json",
    "model/model.safetensors",
    "ema/config.json",
    "ema/model.safetensors",
)
# Cases of each file, and trials of each kind in a case.
PARTS, TRIALS = 3, 3
SAMPLE = (
    "checkpoint COMMIT 0",
    "checkpoint optimizer.safetensors 0",
)
TINY = ["model.depth=1", "batch_size=1", "num_frames=2", "image_size=(16, 16)", "ckpt_every=1"]


@dataclass(frozen=True)
class Trial:
    """One damaged file.

    Args:
        copies: how many checkpoints have it, the newest first.
        rank: the rank that alone sees the damage, on a disk of its own; None for a shared disk.
        quick: files are as large as those that the check before the start compares by size only.
    """

    file: str
    kind: str
    seed: int
    copies: int = 1
    rank: int | None = None
    quick: bool = False


def cases(random: Random) -> list[Case]:
    found = []
    for file, part in product(CHECKPOINT_FILES, range(PARTS)):
        trials = draw_trials(random, file)
        found.append(Case(f"checkpoint {file} {part}", (trials,), trials=len(trials)))
    return with_sample(found, SAMPLE)


def draw_trials(random: Random, file: str) -> list[Trial]:
    """As many of each kind, over all numbers of copies, ranks and sizes of files."""
    trials = []
    for kind, _ in product(KINDS, range(TRIALS)):
        rank = random.choice((None, None, None, *range(RANKS)))
        copies = 1 if rank is not None else random.randint(1, len(STEPS))
        quick = rank is None and random.random() < 0.3
        trials.append(Trial(file, kind, random.getrandbits(32), copies, rank, quick))
    return trials


# Checkpoints.


@dataclass
class Start:
    """What a start chose, and what it wrote to the log or raised."""

    chosen: str | None
    text: str
    failed: bool


class LogText(logging.Handler):
    """Keeps the text of all records."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def start(run_dir: Path) -> Start:
    """The start of a run with ``--resume auto``, up to the choice of its checkpoint. Collective."""
    logger, log = logging.getLogger("opensora_sp"), LogText()
    logger.addHandler(log)
    try:
        chosen = choose_checkpoint(run_dir, find_checkpoint(run_dir, "auto"), resume="auto")
        return Start(None if chosen is None else chosen.name, log.text, failed=False)
    except ValueError as error:
        return Start(None, f"{log.text}{error}", failed=True)
    finally:
        logger.removeHandler(log)


@cache
def cached_content(folder: Path) -> dict[str, bytes]:
    return content(folder)


def of_step(found: dict[str, bytes], step: str) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if name.startswith(f"{step}/")}


def damage_checkpoints(run_dir: Path, trial: Trial) -> None:
    random = Random(trial.seed)
    newest_first = [run_dir / checkpoint_name(step) for step in reversed(STEPS)]
    # What is swapped is of another checkpoint, or another file of this one.
    others = [newest_first[-1] / trial.file, newest_first[0] / random.choice(CHECKPOINT_FILES)]
    for folder in newest_first[: trial.copies]:
        damage(folder / trial.file, trial.kind, random, random.choice(others))


def check_starts(whole: Path, place: Path, trial: Trial) -> str | None:
    """Damage a copy of a run and start it twice; the checkpoint chosen. Called by all ranks."""
    rank = dist.get_rank()
    on_own_disk = trial.rank is not None
    place = place / (f"rank {rank}" if on_own_disk else "all")
    if rank == 0 or on_own_disk:
        shutil.copytree(whole, place / "run", ignore=lambda *_: [LAST])
        if trial.rank in (None, rank):
            damage_checkpoints(place / "run", trial)
    dist.barrier()

    # The path is the same on each rank, as on hosts with disks of their own.
    os.chdir(place)
    run_dir, written = Path("run"), cached_content(whole)
    damaged = content(run_dir)
    steps = [checkpoint_name(step) for step in reversed(STEPS)]
    differing = [step for step in steps if of_step(damaged, step) != of_step(written, step)]
    expected = next((step for step in steps if step not in differing), None)
    is_seen: list[Any] = [bool(differing)] * RANKS
    dist.all_gather_object(is_seen, bool(differing))

    limit = 0 if trial.quick else 1 << 20
    with mock.patch("opensora_sp.checkpoint.checkpoint_folder.QUICK_CHECK_BYTES", limit):
        check_refused_by_path(run_dir, differing, written, damaged)
        for _ in range(2):
            dist.barrier()
            started = start(run_dir)
            dist.barrier()
            found = content(run_dir)
            if on_own_disk and any(is_seen):
                assert "got different checkpoints on different ranks" in started.text, started
                assert found == damaged, f"{trial}: a refused start has changed files"
            else:
                check_start(started, expected, differing, written, damaged, found)
    return expected


def check_refused_by_path(
    run_dir: Path, differing: list[str], written: dict[str, bytes], damaged: dict[str, bytes]
) -> None:
    """``--resume PATH`` and sampling refuse each damaged checkpoint; nothing is changed."""
    for step in differing:
        for part in ("", "ema", "model"):
            of_part = {name for name in written if name.startswith(f"{step}/{part}")}
            of_part |= {f"{step}/COMMIT", f"{step}/manifest.json"}
            changed = [name for name in of_part if damaged.get(name) != written[name]]
            if changed:
                with pytest.raises(ValueError) as error:
                    verify(run_dir / step, part=part)
                assert names_one(str(error.value), changed), error.value
    assert content(run_dir) == damaged


def names_one(text: str, files: Iterable[str]) -> bool:
    """Whether a message names one of the files, or the format that is in a COMMIT."""
    files = list(files)
    named = any(f"{file}" in text for file in files)
    of_commits = [file.removesuffix("/COMMIT") for file in files if file.endswith("/COMMIT")]
    in_commit = any(f"run/{step}" in text for step in of_commits)
    return named or (in_commit and ("COMMIT" in text or "format" in text))


def check_start(
    started: Start,
    expected: str | None,
    differing: list[str],
    written: dict[str, bytes],
    damaged: dict[str, bytes],
    found: dict[str, bytes],
) -> None:
    """The newest whole checkpoint is resumed from, or the start fails; nothing else changes."""
    assert started.chosen == expected, f"resumes from {started.chosen}, not {expected}: {started}"
    assert started.failed == (expected is None), started
    changed = [name for name in written if damaged.get(name) != written[name]]
    if expected is None:
        assert "none can be resumed" in started.text, started
        uncommitted = all(f"{step}/COMMIT" not in damaged for step in differing)
        assert uncommitted or names_one(started.text, changed), started
        assert found == damaged, "a start that fails has changed files"
        return

    # As they were, or renamed.
    kept = dict(damaged)
    for step in differing:
        if step > expected and of_step(found, f"{step}.damaged"):
            for name in of_step(damaged, step):
                kept[name.replace(step, f"{step}.damaged", 1)] = kept.pop(name)
        elif step > expected and f"{step}/COMMIT" in damaged:
            assert dist.get_rank() or names_one(started.text, changed), started
    assert found == kept, "more has changed than the names of damaged checkpoints"


def train_once(folder: Path, outputs: Path, resume: bool) -> None:
    """Train up to the last step. Called by all ranks."""
    from opensora_sp.training import metrics
    from opensora_sp.training.run import train

    metrics.draw_loss = lambda run_dir: None
    options = [f"outputs={outputs}", "max_steps=4", *TINY]
    train(load_train_config(folder / "config.py", options), resume="auto" if resume else None)


def start_damaged(folder: Path, place: Path, trials: list[Trial]) -> list[Path]:
    """All trials; the runs of which a checkpoint can be resumed. Called by all ranks."""
    resumable = []
    for number, trial in enumerate(trials):
        chosen = check_starts(folder / "whole", place / str(number), trial)
        if chosen is not None and trial.rank is None:
            resumable.append(place / str(number) / "all" / "run")
    return resumable


def check_trained_on(folder: Path, run_dir: Path) -> None:
    """The start after that trains to the state of the run that was not disturbed."""
    run_ranks(RANKS, train_once, folder, run_dir, True)
    found, expected = (content(one / LAST) for one in (run_dir, folder / "whole"))
    for file in CHECKPOINT_FILES:
        if file.endswith(".safetensors"):
            assert found[file] == expected[file], f"{file} differs after training on"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, its clips, and a run of four steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("damaged")
    write_training(folder, 4)
    run_ranks(RANKS, train_once, folder, folder / "whole", False)
    whole = folder / "whole"
    kept = [checkpoint_name(step) for step in STEPS]
    for path in whole.iterdir():
        if path.name not in (*kept, LAST, "latest"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


# The campaign.


def check(request: pytest.FixtureRequest, place: Path, case: Case) -> None:
    """Run the trials of a case."""
    (trials,) = case.arguments
    folder = request.getfixturevalue("run")
    resumable, *_ = run_ranks(RANKS, start_damaged, folder, place, trials)
    check_trained_on(folder, resumable[-1])


def test_damage_is_refused(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    check(request, tmp_path, case)
