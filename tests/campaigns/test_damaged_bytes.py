"""Damaged bytes: bits flipped, blocks zeroed, files cut, extended, swapped or removed.

Each trial damages files of a run's checkpoints, of a Booster's folders or of a manifest. What was
written is either read as it was, or refused with the file's name. Nothing else may change: no
weight, and no file but for the rename to ``*.damaged``. The start after it does the same.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from damage import KINDS, content, damage
from ranks import run_ranks
from runs import write_training

from campaigns.case import Case, with_sample
from opensora_sp.checkpoint import checkpoint_name, verify
from opensora_sp.config import load_train_config
from opensora_sp.data import Manifest
from opensora_sp.features.same_clips import agree_on_clips, by_name, changes
from opensora_sp.training.checkpointing import choose_checkpoint, find_checkpoint

pytestmark = pytest.mark.campaign(
    bar="refused before anything changes, the file named; so does the next start", size=450
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
BOOSTER_FOLDERS = ("model", "optimizer")
SUFFIXES = ("csv", "jsonl", "parquet")
# Cases of each file, and trials of each kind in a case.
PARTS, TRIALS = 2, 3
SAMPLE = (
    "checkpoint COMMIT 0",
    "checkpoint optimizer.safetensors 0",
    "booster model 0",
    "manifest jsonl 0",
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
    targets = [("checkpoint", file) for file in CHECKPOINT_FILES]
    targets += [("booster", folder) for folder in BOOSTER_FOLDERS]
    targets += [("manifest", suffix) for suffix in SUFFIXES]

    found = []
    for (target, file), part in product(targets, range(PARTS)):
        trials = draw_trials(random, file)
        found.append(Case(f"{target} {file} {part}", (target, trials), trials=len(trials)))
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


# What a Booster has saved.


def start_booster(place: Path, trials: list[Trial]) -> None:
    """Load damaged copies of sharded folders into a model. Called by all ranks."""
    from plugin_cases import make_model

    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    booster = Booster(plugin=SequenceParallelPlugin(sp_size=RANKS, stage=1, precision="fp32"))
    bare = make_model()
    model, optimizer, *_ = booster.boost(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))
    shards = optimizer.shards
    for name, master in shards.master_weights.items():
        moments = {"exp_avg": torch.zeros(shards.working[name].shape), "step": torch.tensor(3.0)}
        shards.set_state(name, {**moments, "exp_avg_sq": moments["exp_avg"] + 1})
        master.add_(1)
    folders = {"model": place / "model", "optimizer": place / "optimizer"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        booster.save_model(model, str(folders["model"]), shard=True, size_per_shard=0.02)
        booster.save_optimizer(optimizer, str(folders["optimizer"]), shard=True, size_per_shard=1)
    saved = state_of(shards)

    for number, trial in enumerate(trials):
        check_load(booster, model, optimizer, saved, folders, place / str(number), trial)


def state_of(shards: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's master weights and moments."""
    found = {name: master.clone() for name, master in shards.master_weights.items()}
    for name, state in shards.states().items():
        for kind, value in state.items():
            found[f"{kind}/{name}"] = torch.as_tensor(value).clone()
    return found


def check_load(
    booster: Any,
    model: Any,
    optimizer: Any,
    saved: dict[str, torch.Tensor],
    folders: dict[str, Path],
    place: Path,
    trial: Trial,
) -> None:
    """Load a damaged copy twice: the saved state, or an error that has changed no weight."""
    if dist.get_rank() == 0:
        shutil.copytree(folders[trial.file], place)
        random = Random(trial.seed)
        files = sorted(place.iterdir())
        damage(random.choice(files), trial.kind, random, random.choice(files))
    dist.barrier()
    written, damaged = content(folders[trial.file]), content(place)
    changed = [name for name in written if damaged.get(name) != written[name]]

    for _ in range(2):
        # No number is the saved one.
        for name, tensor in live_tensors(optimizer.shards).items():
            tensor.copy_(saved[name] + 7)
        before, error = state_of(optimizer.shards), ""
        try:
            if trial.file == "model":
                booster.load_model(model, str(place))
            else:
                booster.load_optimizer(optimizer, str(place))
        except ValueError as raised:
            error = str(raised)

        found = state_of(optimizer.shards)
        loaded = [name for name in found if ("/" in name) == (trial.file == "optimizer")]
        expected = before if error else {**before, **{name: saved[name] for name in loaded}}
        wrong = [name for name in found if not torch.equal(found[name], expected[name])]
        assert not wrong, f"{trial}: weights have changed, {wrong[:3]} ({error or 'no error'})"
        assert not error or changed, f"{trial}: nothing is damaged, and yet {error}"
        # Without an index, nothing but the folder can be named.
        has_index = any(".index" in name for name in damaged)
        assert not error or names_one(error, changed if has_index else [str(place)]), error
        assert content(place) == damaged, "loading has changed files"


def live_tensors(shards: Any) -> dict[str, torch.Tensor]:
    """This rank's master weights and moments."""
    found = dict(shards.master_weights)
    for name, state in shards.states().items():
        moments = {kind: value for kind, value in state.items() if kind != "step"}
        found |= {f"{kind}/{name}": value for kind, value in moments.items()}
    return found


# Manifests.


@dataclass
class Read:
    """What a rank has read of its manifest: digests by column, the clips, or an error."""

    columns: dict[str, str]
    clips: list[tuple]
    error: str = ""


def read_manifest(path: Path) -> Read:
    try:
        manifest = Manifest(path)
    except ValueError as error:
        return Read({}, [], str(error))
    clips = [tuple(entry[:5]) for entry in manifest]
    # Without the folder.
    clips = [(path.name, *numbers) for path, *numbers in clips]
    return Read(by_name(manifest.fingerprint), clips)


def check_manifest(whole: Path, place: Path, trial: Trial) -> None:
    """Damage one rank's copy, or that of all ranks of a run that resumes. Called by all ranks."""
    rank = dist.get_rank()
    place = place / f"rank {rank}"
    place.mkdir(parents=True)
    file = shutil.copy(whole, place)
    if trial.rank in (None, rank):
        random = Random(trial.seed)
        # In a manifest, what is swapped is the order of its first two clips.
        damage_manifest(Path(file), trial.kind, random)
    damaged, recorded = content(place), read_manifest(whole)

    for _ in range(2):
        read = read_manifest(Path(file))
        assert not read.error or "got " in read.error, read.error
        assert not read.error or names_one(read.error, [whole.name]), read.error
        others: list[Any] = [None] * RANKS
        dist.all_gather_object(others, read)
        if any(one.error for one in others):
            continue

        noticed = changes(read.columns, recorded.columns)
        assert bool(noticed) == (read.clips != recorded.clips), f"{trial}: {noticed}, {read.clips}"
        if any(one.clips != read.clips for one in others):
            with pytest.raises(ValueError, match="got different clips on different ranks: "):
                agree_on_clips(read.columns)
        else:
            agree_on_clips(read.columns)
    assert content(place) == damaged


def damage_manifest(file: Path, kind: str, random: Random) -> None:
    other = file.with_name("other")
    other.write_bytes(write_swapped(file).read_bytes())
    damage(file, kind, random, other)
    other.unlink()
    file.with_name("written" + file.suffix).unlink(missing_ok=True)


def write_swapped(like: Path) -> Path:
    """The clips of a manifest beside it, the first two in the other order."""
    from opensora_sp.data import write_manifest

    path = like.with_name("written" + like.suffix)
    entries = [entry._replace(path=Path(entry.path.name)) for entry in Manifest(like)]
    write_manifest(path, [entries[1], entries[0], *entries[2:]])
    return path


def check_manifests(whole: Path, place: Path, trials: list[Trial]) -> None:
    """All trials. Called by all ranks."""
    for number, trial in enumerate(trials):
        check_manifest(whole, place / str(number), trial)


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from opensora_sp.data import Entry, write_manifest

    folder = tmp_path_factory.mktemp("manifests")
    entries = [
        Entry(Path(f"{number}.mp4"), f"a clip, number {number}", 30 + number, 48, 64, 24.0, 0.75)
        for number in range(12)
    ]
    for suffix in SUFFIXES:
        write_manifest(folder / f"clips.{suffix}", entries)
    return folder


# The campaign.


def check(request: pytest.FixtureRequest, place: Path, case: Case) -> None:
    """Run the trials of a case."""
    target, trials = case.arguments
    if target == "checkpoint":
        folder = request.getfixturevalue("run")
        resumable, *_ = run_ranks(RANKS, start_damaged, folder, place, trials)
        check_trained_on(folder, resumable[-1])
    elif target == "booster":
        run_ranks(RANKS, start_booster, place, trials)
    else:
        whole = request.getfixturevalue("manifests") / f"clips.{trials[0].file}"
        run_ranks(RANKS, check_manifests, whole, place, trials)


def test_damage_is_refused(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    check(request, tmp_path, case)
