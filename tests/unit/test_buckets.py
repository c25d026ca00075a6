"""Buckets: the release's assignment, the report, steps of equal cost, one order for any world."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bucket_configs import write_bucket_config

from opensora_sp.cli import main
from opensora_sp.config import load_train_config
from opensora_sp.data.bucket_plan import BatchOrder, BucketPlan
from opensora_sp.data.buckets import Buckets
from opensora_sp.data.manifest import Entry, Manifest, write_manifest
from opensora_sp.data.sampler import micro_batches_of, snake_order
from opensora_sp.features.build import Work

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "data" / "buckets_v12.json").read_text()
)
MIXED = {
    "144p": {1: (1.0, 16), 8: (1.0, 6), 16: ((1.0, 0.5), 3)},
    "240p": {1: (0.5, 8), 8: (0.6, 2)},
    "480p": {1: (0.3, 2), 16: (0.0, None)},
}


@pytest.mark.parametrize("name", GOLDEN["configs"])
def test_clips_go_where_the_release_puts_them(name: str) -> None:
    case = GOLDEN["configs"][name]
    config = {
        res: {int(frames): value for frames, value in of.items()}
        for res, of in case["bucket_config"].items()
    }
    buckets = Buckets.of(config)

    assert [
        [one.resolution, one.num_frames, place] for place, one in enumerate(buckets.entries)
    ] == case["bucket_order"]

    rows = case["rows"]
    draws = [
        [np.random.default_rng(row[3] + place).random(2) for place in range(len(buckets.entries))]
        for row in rows
    ]
    sizes = np.array([row[:3] for row in rows], dtype=float).T
    found = buckets.assign(*sizes, interval=case["frame_interval"], draws=np.array(draws))

    for (_, height, width, _, bucket, shape, batch_size), number in zip(rows, found):
        if bucket is None:
            assert number < 0
            continue
        entry = buckets.entries[number]
        assert [entry.resolution, entry.num_frames] == bucket[:2] and entry.batch_size == batch_size
        assert list(entry.shape_at(height / width)) == shape


@pytest.fixture
def work(tmp_path: Path) -> Work:
    write_bucket_config(tmp_path, MIXED)
    return Work(load_train_config(tmp_path / "config.py"))


def manifest(folder: Path, count: int = 400) -> Manifest:
    rng = np.random.default_rng(7)
    frames, heights = rng.choice([1, 5, 12, 30], count), rng.choice([90, 150, 260, 500], count)
    widths = np.round(heights * rng.choice([0.6, 1.0, 16 / 9], count))
    entries = [
        Entry(Path(f"{i}.mp4"), "x", int(f), int(h), int(w))
        for i, (f, h, w) in enumerate(zip(frames, heights, widths))
    ]
    write_manifest(folder / "clips.csv", [*entries, Entry(Path("unknown.mp4"), "x")])
    return Manifest(folder / "clips.csv")


def made(
    rows: Manifest,
    work: Work,
    *,
    per_step: int,
    seed: int = 3,
    buckets: dict | None = None,
    batch_order: BatchOrder = "by_cost",
) -> BucketPlan:
    return BucketPlan(
        rows,
        buckets or MIXED,
        frame_interval=1,
        micro_batches_per_step=per_step,
        seed=seed,
        cost=work.flops,
        batch_order=batch_order,
    )


def test_every_kept_clip_comes_once_in_an_epoch_and_steps_continue(
    tmp_path: Path, work: Work
) -> None:
    rows = manifest(tmp_path)
    plan, again = made(rows, work, per_step=4), made(rows, work, per_step=4)
    epochs = [plan.epoch(number) for number in range(2)]
    # A run that resumes in the second epoch asks for nothing else.
    later = again.step(len(epochs[0].steps) + 2)
    numbers = []

    for epoch in epochs:
        before = sum(len(one.steps) for one in epochs[: epoch.number])
        steps = [plan.step(before + i) for i in range(len(epoch.steps))]
        batches = list(chain.from_iterable(steps))
        sizes = [len(step) for step in steps]
        assert set(sizes[:-1]) <= {4} or sum(size < 4 for size in sizes) == 1
        clips = list(chain.from_iterable(batch.ids for batch in batches))
        assert sorted(clips) == np.flatnonzero(epoch.entry_of_clip >= 0).tolist()
        for batch in batches:
            assert batch.epoch == epoch.number
            assert len({int(epoch.entry_of_clip[i]) for i in batch.ids}) == 1
            entry = plan.buckets.entries[epoch.entry_of_clip[batch.ids[0]]]
            assert len(batch.ids) <= entry.batch_size and batch.shape.num_frames == entry.num_frames
            assert all(
                entry.shape_at(rows[i].height / rows[i].width) == batch.shape for i in batch.ids
            )
        numbers += [batch.number for batch in batches]

    assert len(set(numbers)) == len(numbers)
    assert plan.step(len(epochs[0].steps) + 2) == later
    # Keep probabilities draw anew.
    assert not np.array_equal(epochs[0].entry_of_clip, epochs[1].entry_of_clip)

    batch = plan.step(0)[0]
    replaced = [plan.substitute(batch, batch.ids[0], attempt) for attempt in range(12)]
    assert all(rows[i].num_frames >= batch.shape.num_frames for i in replaced)
    assert len(set(replaced)) > 1
    assert made(rows, work, per_step=4, seed=4).step(0) != plan.step(0)
    other = made(rows, work, per_step=4, buckets={"144p": {1: (1.0, 2)}})
    assert plan.fingerprint == again.fingerprint != other.fingerprint


def test_mixed_steps_have_the_same_micro_batches_in_random_order(
    tmp_path: Path, work: Work
) -> None:
    rows = manifest(tmp_path, 2000)
    by_cost = made(rows, work, per_step=8)
    mixed = made(rows, work, per_step=8, batch_order="mixed")

    def batches_of(plan: BucketPlan) -> list[tuple]:
        return sorted(tuple(one) for one in chain.from_iterable(plan.epoch(0).steps))

    assert batches_of(mixed) == batches_of(by_cost)
    assert [len(step) for step in mixed.epoch(0).steps[:-1]] == [8] * (
        len(mixed.epoch(0).steps) - 1
    )
    again = made(rows, work, per_step=8, batch_order="mixed")
    later = len(mixed.epoch(0).steps) + 1
    assert again.step(later) == mixed.step(later)

    # Of 7 buckets, some have few clips.
    buckets = [len({one.bucket for one in step}) for step in mixed.epoch(0).steps]
    nearly_one = [len({one.bucket for one in step}) for step in by_cost.epoch(0).steps]
    assert np.mean(buckets) > 1.5 * np.mean(nearly_one)
    entries = {entry.name: entry for entry in mixed.buckets.entries}
    for one in mixed.step(0):
        assert entries[one.bucket].num_frames == one.shape.num_frames


@pytest.mark.parametrize(("per_step", "replicas"), [(2, 2), (4, 4), (8, 2), (8, 4), (8, 8)])
def test_replicas_have_equal_work_at_the_same_time(
    tmp_path: Path, work: Work, per_step: int, replicas: int
) -> None:
    """The slowest replica is less than 10 % over the mean, in 9 of 10 rounds and over the epoch."""
    plan = made(manifest(tmp_path, 2000), work, per_step=per_step)
    slowest, means = [], []
    for number in range(len(plan.epoch(0).steps)):
        micro_batches = plan.step(number)
        if len(micro_batches) < per_step:
            continue  # the last step of the epoch
        for turn in zip(
            *(micro_batches_of(micro_batches, replica, replicas) for replica in range(replicas))
        ):
            costs = [one.cost for one in turn]
            slowest.append(max(costs))
            means.append(sum(costs) / replicas)

    steps = map(plan.step, range(len(plan.epoch(0).steps)))
    everything = [batch.cost for batch in chain.from_iterable(steps)]
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(everything)[: len(everything) // replicas * replicas].reshape(
        -1, replicas
    )
    naive = shuffled.max(axis=1).sum() / shuffled.mean(axis=1).sum()
    ours = sum(slowest) / sum(means)

    assert ours < 1.1 < naive, (ours, naive)
    assert np.mean(np.array(slowest) < 1.1 * np.array(means)) > 0.9


def test_rounds_are_distributed_in_snake_order() -> None:
    assert snake_order([1.0, 9.0, 4.0, 8.0, 5.0], 2) == [[1, 2, 0], [3, 4, None]]
    assert snake_order([1.0], 3) == [[0], [None], [None]] and snake_order([2.0, 2.0], 1) == [[0, 1]]


def test_the_report_names_dropped_clips_and_the_reason(tmp_path: Path, work: Work) -> None:
    rows = manifest(tmp_path)
    report = made(rows, work, per_step=4).describe()
    found = made(rows, work, per_step=4).epoch(0).entry_of_clip
    flat = {" ".join(line.split()[:-1]): line for line in report}

    assert any(
        line.split()[:4] == ["144p", "x", "8", str((found == 5).sum())] for line in report
    ), report

    counted = Counter(found.tolist())
    for reason, words in [
        (-1, "not in the manifest"),
        (-2, "fewer pixels"),
        (-3, "too few frames"),
        (-4, "probabilities"),
    ]:
        if counted[reason]:
            assert any(
                f"dropped {counted[reason]}" in " ".join(line.split()) and words in line
                for line in report
            ), flat

    assert counted[-1] == 1 and counted[-2] and counted[-3]
    assert f"{(found >= 0).sum()} of 401 clips" in report[-1]
    with pytest.raises(ValueError, match=r"(?s)got no clip for any bucket.*4k x 900 .*dropped"):
        made(rows, work, per_step=4, buckets={"4k": {900: (1.0, 1)}})

    some = made(rows, work, per_step=4, buckets={"144p": {1: (1.0, 16)}, "4k": {900: (1.0, 1)}})
    assert some.buckets_with_clips == {"144p x 1"}


@pytest.mark.parametrize(
    ("config", "possible"),
    [
        ({"240p": {8: (1.0, 2)}, "144p": {8: (1.0, 6)}}, {"240p x 8", "144p x 8"}),
        ({"240p": {8: (0.0, None)}, "144p": {8: (1.0, 6)}}, {"144p x 8"}),
        (
            {"240p": {16: ((1.0, 0.5), 2), 8: (1.0, 4), 64: (1.0, 1)}, "144p": {1: (1.0, 6)}},
            {"240p x 16", "240p x 8"},
        ),
    ],
)
def test_buckets_that_some_epoch_may_draw_clips_for(
    config: dict[str, Any], possible: set[str]
) -> None:
    """Also where the first epoch has drawn none."""
    buckets = Buckets.of(config)
    columns = np.array([[30.0, 240, 426], [30.0, np.nan, 426], [5.0, 90, 160]]).T
    numbers = buckets.possible(*columns, interval=1)
    assert {buckets.entries[number].name for number in numbers} == possible

    draws = np.random.default_rng(0).random((1000, 3, len(buckets.entries), 2))
    drawn = {n for one in draws for n in buckets.assign(*columns, interval=1, draws=one).tolist()}
    assert drawn - {-1, -2, -3, -4} <= set(numbers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["bucket_config={'240': {1: (1.0, 1)}}"], "got the resolution '240' in bucket_config"),
        (["bucket_config={'240p': {1: (1.5, 1)}}"], r"got bucket_config\['240p'\]\[1\] = \(1.5"),
        (["bucket_config={'240p': {1: ((1.0, 0.5), 1)}}"], "expected one for images"),
        (["bucket_config={'240p': {5: (1.0, 0)}}"], "batch size"),
        (["bucket_config={'240p': {5: (0.0, None)}}"], "keeps no clip"),
        (["bucket_config={'240p': 3}"], "expected for example"),
        (["num_frames=7"], "got num_frames 7 with bucket_config"),
        (["dataset.type=VideoText"], "got dataset.type 'VideoText' with bucket_config"),
        (
            ["bucket_config=None", "num_frames=4", "image_size=(8, 8)"],
            "'VariableVideoText' without bucket_config",
        ),
    ],
)
def test_buckets_that_cannot_be_are_refused(
    tmp_path: Path, options: list[str], message: str
) -> None:
    write_bucket_config(tmp_path, MIXED)
    with pytest.raises(ValueError, match=message):
        load_train_config(tmp_path / "config.py", options)


def test_a_plan_has_a_line_for_each_bucket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buckets = {"144p": {8: (1.0, 6)}, "240p": {1: (0.5, 8), 8: (0.0, None)}}
    write_bucket_config(tmp_path, buckets)
    main(["plan", str(tmp_path / "config.py"), "--gpus", "2", "--cfg-options", "sp_size=2"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    reported = [" ".join(line.split()) for line in lines]
    for batch, tokens, mode in [
        ("8 of 1 x 240x426", 8 * 15 * 27, "whole samples"),
        ("6 of 8 x 144x256", 6 * 8 * 9 * 16, "whole samples"),
    ]:
        assert any(line.startswith(f"{batch} {tokens:,} 2 {mode} 0.0 ") for line in reported), (
            reported
        )
    assert not any(" 8 x 240x426" in line for line in reported)  # keeps nothing
