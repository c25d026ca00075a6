"""A run that was cut and resumed in a fresh process equals the uncut run, to the last bit.

In CI 8 cuts; ``make test-resume`` does 384. Every step writes a checkpoint. Its manifest has the
SHA-256 of fp32 master weights, EMA weights and optimizer state, its ``state.json`` the learning
rate and the data position.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from recorded_draws import record_draws
from runs import write_training
from tiers import sample_or_grid
from worlds import TRAINING, in_worlds

from opensora_sp.config import load_train_config
from opensora_sp.data import Clip, Sample, VideoTextDataset, dataset
from opensora_sp.training.metrics import read_metrics

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
MICRO_BATCHES, CLIPS = 2, 8  # of two clips: two steps an epoch
# Learning rate and EMA decay change with each of the first steps, and epochs end at even ones.
SAMPLE, GRID = [2], list(range(1, 49))
STEPS_AFTER = 20

RANDOM = [
    "image_size=(16, 12)",
    "dataset.transform=resize_random_crop",
    "dataset.clip_start=random",
    "mask_ratios={'image_head': 0.5}",
]
TINY = ["warmup_steps=3", "batch_size=2", "num_frames=3", "image_size=(16, 16)", "model.depth=1"]


def train_once(
    config: Path,
    outputs: Path,
    layout: tuple[int, int],
    steps: int,
    *options: str,
    resume: bool = False,
) -> None:
    from opensora_sp.training import metrics, train, trainer

    trainer.draw_loss = metrics.draw_loss = lambda run_dir: None
    own = [
        f"outputs={outputs}",
        f"max_steps={steps}",
        "ckpt_every=1",
        f"sp_size={layout[1]}",
        *TINY,
    ]
    train(load_train_config(config, [*own, *options]), resume="auto" if resume else None)


def name_of(layout: tuple[int, int], precision: str) -> str:
    return f"dp{layout[0]}sp{layout[1]}{precision}"


def run_whole(
    config: Path, root: Path, layout: tuple[int, int], precision: str, steps: int
) -> dict[int, tuple]:
    drawn: dict[int, tuple] = {}
    record_draws(drawn)
    train_once(config, root / name_of(layout, precision), layout, steps, f"precision={precision}")
    return drawn


def run_on(
    config: Path,
    root: Path,
    layout: tuple[int, int],
    precision: str,
    cut: int,
    left_out: str | None,
) -> dict:
    """Resume from the checkpoint of step ``cut``; the state ``left_out`` stays as it was built."""
    from opensora_sp.training.checkpointing import TrainingState

    drawn: dict[int, tuple] = {}
    record_draws(drawn)
    whole = root / name_of(layout, precision)
    outputs = root / f"{whole.name} cut {cut} {left_out}"
    if dist.get_rank() == 0:
        shutil.copytree(whole / f"step_{cut:08d}", outputs / f"step_{cut:08d}")
    dist.barrier()
    load = TrainingState.load
    if left_out:
        TrainingState.load = lambda self, folder: without(left_out, self, load, folder)
    try:
        steps = cut + 2 if left_out else cut + STEPS_AFTER
        train_once(config, outputs, layout, steps, f"precision={precision}", resume=True)
    finally:
        TrainingState.load = load
    return drawn


def without(part: str, tensors: Any, load: Callable, folder: Path) -> dict[str, Any]:
    built = {name: master.clone() for name, master in tensors.shards.master_weights.items()}
    state = load(tensors, folder)
    shards, ema = tensors.shards, tensors.ema
    if part == "step":  # schedule, data position and streams
        return {**state, "step": state["step"] - 1}

    for name, master in shards.master_weights.items():
        if part == "weights":
            master.copy_(built[name])
        elif part == "master weights":  # what the working weights know of them
            master.copy_(master.bfloat16())
        elif part == "moments":
            shards.set_state(name, {})
        elif part == "average":
            ema.shards[name].copy_(master)

    return state


CONTROLS = [
    ("fp32", "weights"),
    ("fp32", "moments"),
    ("fp32", "average"),
    ("fp32", "step"),
    ("bf16", "master weights"),
]


def all_whole(config: Path, root: Path, steps: int) -> list:
    worlds = []
    for (dp, sp), kind in product(LAYOUTS, ("fp32", "bf16")):
        worlds.append((dp * sp, (config, root, (dp, sp), kind, steps)))
    return in_worlds(run_whole, worlds, TRAINING)


def all_cut(config: Path, root: Path, cuts: list[int]) -> list:
    cases = [(*case, None) for case in product(LAYOUTS, ("fp32", "bf16"), cuts)]
    cases += [((1, 1), kind, 1, part) for kind, part in CONTROLS]
    return in_worlds(
        run_on, [(case[0][0] * case[0][1], (config, root, *case)) for case in cases], TRAINING
    )


def seen(outputs: Path, step: int) -> tuple[dict, dict]:
    """Digests of all tensors, and the rest of the state."""
    folder = outputs / f"step_{step:08d}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    state = json.loads((folder / "state.json").read_text())
    del state["config"]  # which names the folder
    return {
        name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")
    }, state


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training(tmp_path_factory.mktemp("set"), CLIPS)


@pytest.mark.slow
@sample_or_grid
def test_a_cut_run_is_the_run_that_was_not_cut(config: Path, tmp_path: Path, grid: bool) -> None:
    cuts, limit = (GRID, 7200) if grid else (SAMPLE, 900)
    whole_draws = run_ranks(4, all_whole, config, tmp_path, cuts[-1] + STEPS_AFTER, timeout=limit)
    cut_draws = run_ranks(4, all_cut, config, tmp_path, cuts, timeout=limit)  # fresh processes
    number = 0

    for place, layout in enumerate(LAYOUTS):
        for i, kind in enumerate(("fp32", "bf16")):
            whole = tmp_path / name_of(layout, kind)
            losses = [line["loss"] for line in read_metrics(whole)]
            for cut in cuts:
                outputs = tmp_path / f"{whole.name} cut {cut} None"
                for step in range(cut + 1, cut + STEPS_AFTER + 1):
                    assert seen(outputs, step) == seen(whole, step), (outputs.name, step)
                assert [line["loss"] for line in read_metrics(outputs)] == losses[
                    cut : cut + STEPS_AFTER
                ]
                for rank in range(layout[0] * layout[1]):
                    ours, theirs = cut_draws[rank][number], whole_draws[rank][2 * place + i]
                    wanted = {
                        m: drawn
                        for m, drawn in theirs.items()
                        if cut <= m // MICRO_BATCHES < cut + STEPS_AFTER
                    }
                    assert ours == wanted and wanted
                number += 1

    for kind, part in CONTROLS:
        whole, outputs = (
            tmp_path / name_of((1, 1), kind),
            tmp_path / f"{name_of((1, 1), kind)} cut 1 {part}",
        )
        assert seen(outputs, 3) != seen(whole, 3), f"leaving out {part} goes unnoticed"


class CutError(Exception):
    """Where a run is interrupted."""


@dataclass(frozen=True)
class CutClip(Clip):
    """A clip that knows the first frame and the place of its crop in the file."""

    cut: tuple


class CutClips(VideoTextDataset):
    """A dataset whose clips know it, in workers as well."""

    def _read(self, sample: Sample) -> CutClip:
        seen: dict[str, Any] = {}

        def read_video(path: Path, **options: Any) -> Any:
            seen["start"] = options["start"] - sample.frames[0]
            return reads(path, **options)

        def resize_and_crop(frames: Any, size: Any, place: Any) -> Any:
            seen["place"] = place
            return crops(frames, size, place)

        reads, crops = dataset.read_video, dataset.resize_and_crop
        dataset.read_video, dataset.resize_and_crop = read_video, resize_and_crop
        try:
            clip = super()._read(sample)
        finally:
            dataset.read_video, dataset.resize_and_crop = reads, crops
        return CutClip(clip.video, clip.text, clip.fps, (seen["start"], *seen["place"]))


def record_crops(into: dict[int, dict]) -> None:
    """Note where the clips of each micro-batch that this rank has read were cut from."""
    from opensora_sp.features.sharded import ShardedEncoder
    from opensora_sp.training import preflight

    make, take = (
        getattr(function, "original", function)
        for function in (preflight.make_dataset, ShardedEncoder.encode)
    )

    def recorded_make(cfg: Any) -> CutClips:
        made = make(cfg)
        made.__class__ = CutClips
        return made

    def recorded_take(self: Any, micro_batch: Any, items: Any) -> Any:
        samples = self.samples(micro_batch)
        into[micro_batch.number] = {
            s.clip: item.cut for s, item in zip(samples, items, strict=True)
        }
        return take(self, micro_batch, items)

    recorded_make.original, recorded_take.original = make, take
    preflight.make_dataset, ShardedEncoder.encode = recorded_make, recorded_take


def sample_log(
    config: Path,
    root: Path,
    layout: tuple[int, int],
    workers: int,
    cuts: tuple[int, ...],
    attempt: int,
) -> list:
    """What one attempt consumed, in order, without the step in which it was interrupted."""
    from opensora_sp.training.trainer import Trainer

    multiprocessing.current_process()._config["daemon"] = False  # so that loaders may have workers
    rows: list[tuple] = []
    drawn: dict[int, tuple] = {}
    crops: dict[int, dict] = {}
    record_draws(drawn)
    record_crops(crops)
    recorded = Trainer._batch
    until = cuts[attempt] if attempt < len(cuts) else None

    def interrupted(self: Any, loaded: Any) -> Any:
        batch = recorded(self, loaded)
        micro_batch = loaded.micro_batch.number
        rows.append((micro_batch, drawn[micro_batch], crops[micro_batch]))
        step, place = divmod(micro_batch, MICRO_BATCHES)
        # The last one of this rank: gradients are being accumulated.
        if step == until and place >= MICRO_BATCHES - layout[0]:
            raise CutError
        return batch

    interrupted.original = recorded.original
    Trainer._batch = interrupted
    outputs = root / f"sample_log {layout} {workers} {len(cuts)}"
    try:
        train_once(
            config,
            outputs,
            layout,
            4,
            f"num_workers={workers}",
            *RANDOM,
            "async_save=True",
            resume=True,
        )
        assert until is None
    except CutError:
        rows = [row for row in rows if row[0] // MICRO_BATCHES != until]
    return rows


SampleLogs = list[tuple[tuple[int, int], int, tuple[int, ...]]]  # layout, workers, cuts
EACH_ONCE: SampleLogs = [((1, 1), 2, ()), ((2, 2), 0, (1,)), ((2, 2), 2, (0, 1, 3))]
SAMPLE_LOGS: SampleLogs = list(product([(1, 1), (2, 2)], [0, 2], [(), (1,), (0, 1, 3)]))


def all_sample_logs(config: Path, root: Path, sample_logs: SampleLogs) -> list:
    cases = []
    for layout, workers, cuts in sample_logs:
        for attempt in range(len(cuts) + 1):
            arguments = (config, root, layout, workers, cuts, attempt)
            cases.append((layout[0] * layout[1], arguments))

    found = iter(in_worlds(sample_log, cases, TRAINING))
    return [[next(found) for _ in range(len(cuts) + 1)] for _, _, cuts in sample_logs]


def items_of(cuts: Iterable[tuple[int, dict]]) -> Iterator[tuple[int, tuple]]:
    """Micro-batch and ``(clip, crop)`` of each crop."""
    for micro_batch, cut in cuts:
        for item in cut.items():
            yield micro_batch, item


@pytest.mark.slow
@sample_or_grid
def test_the_sample_log_of_two_epochs(config: Path, tmp_path: Path, grid: bool) -> None:
    """No duplicate, no omission, peers equal, replicas different, whoever interrupts and reads."""
    chosen = SAMPLE_LOGS if grid else EACH_ONCE
    of_ranks = run_ranks(4, all_sample_logs, config, tmp_path, chosen, timeout=900)
    rows = list(chain.from_iterable(of_ranks[0][0]))
    reference = {m: drawn for m, drawn, _ in rows}
    crops = {m: cut for m, _, cut in rows}
    wanted_crops = list(items_of(crops.items()))
    assert len({crop for _, (_, crop) in wanted_crops}) == 2 * CLIPS  # no two alike
    for epoch in range(2):
        micro_batches = range(epoch * 4, epoch * 4 + 4)
        clips = list(chain.from_iterable(reference[m][0] for m in micro_batches))
        assert sorted(clips) == list(range(CLIPS))
    assert len({digest for _, _, digest in reference.values()}) == len(reference) == 8

    for case, (layout, _, _) in enumerate(chosen):
        sample_logs = [
            list(chain.from_iterable(attempt or () for attempt in of_rank[case]))
            for of_rank in of_ranks
        ]
        for rank in range(layout[0] * layout[1]):
            first = sample_logs[rank - rank % layout[1]]  # the peers' of its replica
            assert [row[:2] for row in sample_logs[rank]] == [row[:2] for row in first]

        of_replicas = chain.from_iterable(sample_logs[: layout[0] * layout[1] : layout[1]])
        of_replicas = [row[:2] for row in of_replicas]
        assert len(of_replicas) == 8 and dict(of_replicas) == reference, chosen[case]

        cuts = items_of((m, cut) for m, _, cut in chain.from_iterable(sample_logs))
        assert sorted(cuts) == sorted(wanted_crops), chosen[case]
