"""Video files, manifests, and the sequence of samples."""

from __future__ import annotations

from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
from runs import TRAIN, write_toy_set

from opensora_sp.config import load_train_config
from opensora_sp.data.dataset import Clip, ClipShape, CorruptSample, Sample, VideoTextDataset
from opensora_sp.data.loader import StepLoader
from opensora_sp.data.sampler import MicroBatchPlan, ReplicaBatches, micro_batches_of
from opensora_sp.data.toy import COLOURS, toy_clip
from opensora_sp.data.transforms import to_clip, to_frames
from opensora_sp.data.video import count_frames, read_video, write_video
from opensora_sp.features.build import make_dataset, make_plan, order_state

SHAPE = ClipShape(4, 16, 16)


def test_toy_clips_are_deterministic_and_show_what_they_say() -> None:
    for index in range(20):
        clip = toy_clip(3, index)
        assert clip == toy_clip(3, index) and clip != toy_clip(4, index)
        frames = clip.draw(5, 48)
        assert frames.shape == (5, 48, 48, 3) and np.array_equal(frames, clip.draw(5, 48))
        assert clip.colour != clip.background
        # Shapes stay inside the frame.
        assert np.allclose(frames[:, 0, 0], COLOURS[clip.background])

        seen = [
            np.argwhere((frame == COLOURS[clip.colour]).all(-1)).mean(0)
            for frame in (frames[0], frames[-1])
        ]
        down, right = seen[1] - seen[0]
        moved = {"right": right, "left": -right, "down": down, "up": -down}
        assert max(moved, key=moved.get) == clip.direction


def test_a_written_video_reads_back(tmp_path: Path) -> None:
    frames = toy_clip(0, 0).draw(10, 64)
    write_video(tmp_path / "a.mp4", frames, fps=12)
    back, fps = read_video(tmp_path / "a.mp4", num_frames=10)
    assert fps == 12 and back.shape == frames.shape
    assert np.abs(back.astype(int) - frames).mean() < 3  # H.264 is lossy
    assert count_frames(tmp_path / "a.mp4") == 10  # where a header has no count
    middle, fps = read_video(tmp_path / "a.mp4", num_frames=3, interval=2, start=2)
    assert fps == 6 and np.array_equal(middle, back[2:7:2])
    with pytest.raises(ValueError, match="got 10 frames; expected at least 11"):
        read_video(tmp_path / "a.mp4", num_frames=11)
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_clips_cover_the_frame_and_crop_the_centre() -> None:
    frames = np.zeros((2, 20, 60, 3), dtype=np.uint8)
    frames[:, :, 20:40] = 255
    clip = to_clip(frames, (10, 10))
    assert clip.shape == (3, 2, 10, 10) and (clip > 0.7).all() and (clip[..., 1:-1] == 1).all()
    exact = to_clip(frames, (20, 60))
    assert np.array_equal(to_frames(exact), frames)


def test_a_dataset_reads_a_users_csv(tmp_path: Path) -> None:
    manifest = write_toy_set(tmp_path, 3, broken=(1,))
    dataset = VideoTextDataset(str(manifest), num_frames=4, image_size=(16, 16), cache=True)
    clip = dataset[0]
    assert isinstance(clip, Clip) and clip.video.shape == (3, 4, 16, 16) and clip.fps == 8
    assert clip.text == toy_clip(0, 0).caption
    assert isinstance(dataset[1], CorruptSample) and "1.mp4" in dataset[1].path
    assert dataset[0].video is clip.video


def test_the_sequence_of_samples_does_not_depend_on_the_world() -> None:
    plan = MicroBatchPlan(
        num_samples=23, batch_size=3, micro_batches_per_step=4, seed=5, shape=SHAPE
    )
    taken = list(chain.from_iterable(map(plan.step, range(4))))
    first, second = taken[: plan.micro_batches_per_epoch], taken[plan.micro_batches_per_epoch :]
    epoch = list(chain.from_iterable(one.ids for one in first))
    assert len(set(epoch)) == len(epoch) == 21 and first[0].ids != second[0].ids  # epochs differ
    assert [one.number for one in taken] == list(range(16))
    assert {one.epoch for one in second[:7]} == {1}

    for replicas in (1, 2, 3, 4, 5):
        shares = [micro_batches_of(plan.step(1), replica, replicas) for replica in range(replicas)]
        assert len({len(one) for one in shares}) == 1  # all join in as many backward passes
        assert sorted(filter(None, chain.from_iterable(shares))) == plan.step(1)
    whole = list(ReplicaBatches(plan, start=0, stop=6, replica=1, num_replicas=3))
    later = list(ReplicaBatches(plan, start=4, stop=6, replica=1, num_replicas=3))
    assert whole[-len(later) :] == later and whole[0][1][0] == Sample(
        micro_batches_of(plan.step(0), 1, 3)[0].ids[0], 0, SHAPE
    )
    with pytest.raises(ValueError, match="got 2 clips and batch_size 3"):
        MicroBatchPlan(num_samples=2, batch_size=3, micro_batches_per_step=1, seed=0, shape=SHAPE)


class Echo:
    """A dataset whose items are the samples asked for."""

    def __getitem__(self, sample: Sample) -> Sample:
        return sample


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_yields_each_micro_batch_with_its_items(num_workers: int) -> None:
    """4 micro-batches on 3 replicas: two rounds each, of which two replicas idle in the second."""
    plan = MicroBatchPlan(
        num_samples=23, batch_size=3, micro_batches_per_step=4, seed=5, shape=SHAPE
    )
    loaded: dict[int, list] = {0: [], 1: []}
    for replica in range(3):
        batches = ReplicaBatches(plan, start=0, stop=2, replica=replica, num_replicas=3)
        for number, step in enumerate(StepLoader(Echo(), batches, num_workers=num_workers, seed=0)):
            assert step.micro_batches == plan.step(number)
            of_step = list(step.loaded)
            assert len(of_step) == 2
            assert all(one.items == one.micro_batch.samples for one in of_step)
            loaded[number] += [one.micro_batch for one in of_step if one.micro_batch.ids]
    for number, micro_batches in loaded.items():
        assert sorted(micro_batches) == plan.step(number)


def test_clips_too_short_by_the_manifest_are_skipped(tmp_path: Path) -> None:
    """With their frame interval; those of which the manifest says nothing stay."""
    manifest = write_toy_set(tmp_path, 6)
    frames = [9, 8, "", 30, 1, 10]
    lines = manifest.read_text().splitlines()
    manifest.write_text(
        "\n".join([f"{lines[0]},num_frames", *(f"{a},{b}" for a, b in zip(lines[1:], frames))])
    )
    (tmp_path / "config.py").write_text(TRAIN.format(manifest=str(manifest)))
    # 9 frames.
    cfg = load_train_config(tmp_path / "config.py", ["dataset.frame_interval=2", "batch_size=2"])

    plan = make_plan(cfg, make_dataset(cfg), 1)
    assert plan.too_short == (1, 4) and plan.describe()[0].startswith(
        "4 clips (2 of 6 skipped, too short for 5 fra"
    )
    for e in range(8):
        assert {*plan.step(2 * e)[0].ids, *plan.step(2 * e + 1)[0].ids} == {0, 2, 3, 5}
    draws = product(range(4), range(20))
    stand_ins = {plan.substitute(plan.step(0)[0], index, attempt) for index, attempt in draws}
    assert stand_ins == {0, 2, 3, 5}
    assert order_state(cfg, plan, 6)["num_samples"] == 4

    with pytest.raises(ValueError, match=r"got 1 clips \(5 of 6 skipped, too short for 5 frames\)"):
        short = cfg.model_copy(
            update={"dataset": cfg.dataset.model_copy(update={"frame_interval": 9})}
        )
        make_plan(short, make_dataset(short), 1)
