"""Every sample is consumed once in an epoch, with the same random numbers, whoever interrupts.

Two epochs are trained in several starts. Each start has its own (dp, sp), number of loader workers
and way to save, and all but the last are interrupted in a step. What the starts have consumed is,
together, what one process consumes without an interrupt: clips, crops, noise, timesteps and drops.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
from ranks import run_ranks
from recorded_draws import record_draws
from worlds import in_worlds

from campaigns.case import Case, with_sample
from opensora_sp.config import load_train_config
from opensora_sp.data import dataset
from opensora_sp.data.dataset import Clip, Sample, VideoTextDataset

pytestmark = pytest.mark.campaign(
    bar="no sample twice, none omitted, the same random numbers", size=126
)

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)]
WORKERS = [0, 1, 2]
MICRO_BATCHES, CLIPS, STEPS = 2, 8, 4  # of two clips: two epochs
MOMENTS = ["before a micro-batch", "before the update", "after the update"]
OPTIONS = [
    *("warmup_steps=3", "batch_size=2", "num_frames=3", "image_size=(16, 12)", "model.depth=1"),
    *("dataset.transform=resize_random_crop", "dataset.clip_start=random"),
    *("mask_ratios={'image_head': 0.5}", f"max_steps={STEPS}", "ckpt_every=1"),
]
SAMPLE = [
    "dp2sp1 0 workers, 1 interrupts, same layout",
    "dp1sp2 1 workers, 2 interrupts, other layouts",
    "dp2sp2 2 workers, 3 interrupts, other layouts",
]


@dataclass(frozen=True)
class Start:
    """One start of a run: how it reads and saves, and where it is interrupted.

    ``interrupt`` is the step, counted from 0, and one of ``MOMENTS``.
    """

    dp: int = 1
    sp: int = 1
    workers: int = 0
    in_background: bool = False
    interrupt: tuple[int, str] | None = None

    @property
    def world(self) -> int:
        return self.dp * self.sp

    @property
    def options(self) -> list[str]:
        own = [f"sp_size={self.sp}", f"num_workers={self.workers}"]
        return [*OPTIONS, *own, f"async_save={self.in_background}"]


def cases(random: Random) -> list[Case]:
    """Layouts x workers x interrupts, with the layout of the first start or with others."""
    found = []
    for (dp, sp), workers, interrupts in product(LAYOUTS, WORKERS, range(4)):
        for layouts in ["same layout", "other layouts"] if interrupts else ["same layout"]:
            first = Start(dp, sp, workers, random.random() < 0.5)
            starts = draw_starts(random, first, interrupts, layouts == "other layouts")
            name = f"dp{dp}sp{sp} {workers} workers, {interrupts} interrupts, {layouts}"
            found.append(Case(name, starts))
    return with_sample(found, SAMPLE)


def draw_starts(random: Random, first: Start, interrupts: int, elastic: bool) -> list[Start]:
    """Steps of the interrupts do not decrease: one may strike again before a step is saved."""
    steps = sorted(random.choices(range(STEPS), k=interrupts))
    starts = [replace(first, interrupt=(step, random.choice(MOMENTS))) for step in steps]
    starts.append(first)
    if not elastic:
        return starts

    others = [layout for layout in LAYOUTS if layout != (first.dp, first.sp)]
    for number in range(1, len(starts)):
        dp, sp = random.choice(others)
        workers = random.choice(WORKERS)
        starts[number] = replace(starts[number], dp=dp, sp=sp, workers=workers)
    return starts


# Recording what a rank consumes


@dataclass
class Log:
    """What a rank has consumed, by micro-batch."""

    draws: dict[int, tuple] = field(default_factory=dict)  # ids, timesteps, digest of all draws
    crops: dict[int, dict] = field(default_factory=dict)  # of the clips that this rank has read

    def up_to(self, step: int) -> Log:
        """What has been consumed by the steps before this one."""
        end = step * MICRO_BATCHES
        draws = {number: drawn for number, drawn in self.draws.items() if number < end}
        crops = {number: crop for number, crop in self.crops.items() if number < end}
        return Log(draws, crops)


@dataclass(frozen=True)
class CroppedClip(Clip):
    """A clip that knows the first frame and the place of its crop in the file."""

    crop: tuple = ()


class CroppedClips(VideoTextDataset):
    """A dataset whose clips know it, in workers as well."""

    def _read(self, sample: Sample) -> CroppedClip:
        seen: dict[str, Any] = {}

        def read_video(path: Path, budget: Any, **options: Any) -> Any:
            seen["start"] = options["start"] - sample.frames[0]
            return reads(path, budget, **options)

        def resize_and_crop(frames: Any, size: Any, place: Any) -> Any:
            seen["place"] = place
            return crops(frames, size, place)

        reads, crops = dataset.read_video, dataset.resize_and_crop
        with (
            mock.patch.object(dataset, "read_video", read_video),
            mock.patch.object(dataset, "resize_and_crop", resize_and_crop),
        ):
            clip = super()._read(sample)
        crop = (seen["start"], *seen["place"])
        return CroppedClip(clip.video, clip.text, clip.fps, crop=crop)


@contextmanager
def recorded_crops(into: dict[int, dict]) -> Iterator[None]:
    """Note where the clips of each micro-batch that this rank has read were cut from."""
    from opensora_sp.features.sharded import ShardedEncoder
    from opensora_sp.training import preflight

    make, encode = preflight.make_dataset, ShardedEncoder.encode

    def recorded_make(cfg: Any) -> CroppedClips:
        made = make(cfg)
        made.__class__ = CroppedClips
        return made

    def recorded_encode(self: Any, micro_batch: Any, items: Any) -> Any:
        samples = self.samples(micro_batch)
        into[micro_batch.number] = {
            sample.clip: item.crop for sample, item in zip(samples, items, strict=True)
        }
        return encode(self, micro_batch, items)

    with (
        mock.patch.object(preflight, "make_dataset", recorded_make),
        mock.patch.object(ShardedEncoder, "encode", recorded_encode),
    ):
        yield


class InterruptError(Exception):
    """Ends a start on all ranks."""


@contextmanager
def interrupted(step: int, moment: str) -> Iterator[None]:
    from opensora_sp.training.step import TrainingStep

    name = "_forward_backward" if moment == "before a micro-batch" else "_update"
    plain = getattr(TrainingStep, name)

    def method(self: TrainingStep, number: int, *args: Any) -> Any:
        if number == step and moment != "after the update":
            raise InterruptError
        result = plain(self, number, *args)
        if number == step:
            raise InterruptError
        return result

    with mock.patch.object(TrainingStep, name, method):
        yield


def consumed(config: Path, outputs: Path, start: Start) -> Log:
    """What one start consumes, without the step in which it is interrupted."""
    from opensora_sp.training import metrics
    from opensora_sp.training.run import train

    metrics.draw_loss = lambda run_dir: None
    # So that loaders may have workers, forked as in a rank that a launcher starts.
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    log = Log()
    record_draws(log.draws)
    cfg = load_train_config(config, [f"outputs={outputs}", *start.options])

    with ExitStack() as patches:
        patches.enter_context(recorded_crops(log.crops))
        if start.interrupt is None:
            train(cfg, resume="auto")
            return log

        patches.enter_context(interrupted(*start.interrupt))
        with pytest.raises(InterruptError):
            train(cfg, resume="auto")
    return log.up_to(start.interrupt[0])


def all_consumed(config: Path, root: Path, starts: list[Start]) -> list:
    """The log of each start."""
    worlds = [(start.world, (config, root, start)) for start in starts]
    return in_worlds(consumed, worlds)


# Checks


def check(config: Path, root: Path, reference: Log, starts: list[Start]) -> None:
    """Train in these starts; what they consume together is the reference."""
    world = max(start.world for start in starts)
    of_ranks = run_ranks(world, all_consumed, config, root, starts)
    draws, crops = [], set()

    for number, start in enumerate(starts):
        logs = [of_rank[number] for of_rank in of_ranks[: start.world]]
        for rank, log in enumerate(logs):
            first = rank - rank % start.sp
            same = log.draws == logs[first].draws
            assert same, f"start {number}: ranks {first} and {rank} of a group differ"
            crops |= crops_of(log)
        draws += chain.from_iterable(log.draws.items() for log in logs[:: start.sp])

    numbers = sorted(number for number, _ in draws)
    assert numbers == list(range(STEPS * MICRO_BATCHES)), f"consumed micro-batches {numbers}"
    assert dict(draws) == reference.draws, "other clips or random numbers"
    assert crops == crops_of(reference), "other crops"


def crops_of(log: Log) -> set[tuple]:
    """Micro-batch, clip and place of each crop."""
    found = set()
    for number, crops in log.crops.items():
        found |= {(number, clip, crop) for clip, crop in crops.items()}
    return found


@pytest.fixture(scope="module")
def reference(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """What one process consumes without an interrupt: each clip once in each epoch."""
    (log,) = run_ranks(1, consumed, config, tmp_path_factory.mktemp("whole") / "run", Start())
    per_epoch = CLIPS // 2
    for epoch in range(2):
        numbers = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        clips = chain.from_iterable(log.draws[number][0] for number in numbers)
        assert sorted(clips) == list(range(CLIPS))

    # No two micro-batches or crops are alike.
    assert len({digest for _, _, digest in log.draws.values()}) == STEPS * MICRO_BATCHES
    assert len({crop for _, _, crop in crops_of(log)}) == 2 * CLIPS
    return log


def test_starts_consume_what_one_process_does(
    case: Case, config: Path, reference: Log, tmp_path: Path
) -> None:
    check(config, tmp_path / "run", reference, case.arguments)
