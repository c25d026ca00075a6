"""The sequence of micro-batches of a bucketed set: every step's micro-batches cost about the same.

In each epoch every clip is put into a bucket or left out (``Buckets``), each bucket is shuffled and cut into
micro-batches, of which the last has what is left, and all of them, by cost, are cut into steps, which are shuffled.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from opensora_sp.randomness import generator

from .buckets import DROPPED, BucketEntry, Buckets
from .dataset import ClipShape
from .manifest import Manifest
from .sampler import MicroBatch

Batch = tuple[ClipShape, tuple[int, ...], float]
"""Shape, ids, cost."""
Cost = Callable[[ClipShape, int], float]
"""Estimated work of a micro-batch: ``cost(shape, clips)``."""
CLIPS_AT_A_TIME = 1 << 16
SAME_BUCKET = (
    5  # replacements looked for in a clip's own bucket, before any file that is long enough will do
)


@dataclass(frozen=True)
class Epoch:
    """What one pass over the clips does."""

    number: int
    found: np.ndarray  # [N], the entry of each clip, or a key of ``DROPPED``
    steps: list[list[Batch]]
    members: dict[ClipShape, np.ndarray]  # ids of the clips of a shape
    table: dict[int, tuple[int, int, int]]  # clips, micro-batches and shapes of each entry


class BucketPlan:
    """A ``BatchPlan`` over buckets.

    The number of steps differs from epoch to epoch where keep probabilities draw; the last step of some epochs has
    fewer micro-batches. Steps are numbered through all epochs.

    Args:
        rows: manifest with ``num_frames``, ``height`` and ``width``.
        bucket_config: see ``buckets``.
        frame_interval: of the dataset.
        micro_batches_per_step, seed: see ``sampler``.
        cost: estimate by which steps are put together.

    Raises:
        ValueError: if no clip is in any bucket; it shows the table that ``describe`` gives.
    """

    def __init__(
        self,
        rows: Manifest,
        bucket_config: Mapping[str, Mapping[int, Any]],
        *,
        frame_interval: int,
        micro_batches_per_step: int,
        seed: int,
        cost: Cost,
    ) -> None:
        self.buckets, self.micro_batches_per_step = (
            Buckets.of(bucket_config),
            micro_batches_per_step,
        )
        self.frame_interval, self.seed, self.cost = frame_interval, seed, cost
        self.num_frames, self.height, self.width = (
            rows.column(name) for name in ("num_frames", "height", "width")
        )
        sizes, of_clip = np.unique(np.stack([self.height, self.width]), axis=1, return_inverse=True)
        self.sizes, self.size_of_clip = sizes.T, of_clip.reshape(-1)  # [U, 2], [N]
        self.epoch = lru_cache(maxsize=2)(self._epoch)
        self._starts = [0]  # first step of each epoch looked at, and of the next one
        if not self.epoch(0).steps:
            raise ValueError(
                f"got no clip for any bucket in epoch 0 of {str(rows.file)!r}:\n"
                + "\n".join(self.describe())
                + "\n"
                "expected at least one; change bucket_config, or add longer or larger clips"
            )

    @property
    def fingerprint(self) -> str:
        """What the sequence depends on beside the seed, to be compared on resume."""
        told = repr((self.frame_interval, self.buckets.entries)).encode()
        columns = b"".join(
            column.tobytes() for column in (self.num_frames, self.height, self.width)
        )
        return f"{zlib.crc32(told + columns):08x}"

    @property
    def steps_per_epoch(self) -> float:
        return len(self.epoch(0).steps)

    def step(self, step: int) -> list[MicroBatch]:
        epoch = self.epoch_of(step)
        first = step * self.micro_batches_per_step
        batches = epoch.steps[step - self._starts[epoch.number]]
        return [
            MicroBatch(first + place, epoch.number, *batch) for place, batch in enumerate(batches)
        ]

    def epoch_of(self, step: int) -> Epoch:
        while self._starts[-1] <= step:
            self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1).steps))
        return self.epoch(bisect.bisect_right(self._starts, step) - 1)

    def replacement(self, micro_batch: MicroBatch, index: int, attempt: int) -> int:
        """A clip of the same bucket; after some attempts any file that is long enough, for it can be cropped."""
        shape = micro_batch.shape
        pool = self.epoch(micro_batch.epoch).members[shape]
        if attempt >= SAME_BUCKET or len(pool) == 1:
            span = (shape.num_frames - 1) * self.frame_interval + 1
            pool = np.flatnonzero(self.num_frames >= span)
        drawn = generator(self.seed, "replacement", micro_batch.epoch, index, attempt)
        return int(pool[drawn.integers(len(pool))])

    def epochs(self, steps: int) -> Iterator[tuple[int, dict[ClipShape, np.ndarray]]]:
        """The clips of each shape, in the epochs of the first ``steps`` steps."""
        for number in range(self.epoch_of(steps - 1).number + 1):
            yield number, self.epoch(number).members

    def describe(self, step: int = 0) -> list[str]:
        """The report before training: clips and micro-batches of each bucket, steps, and why clips were dropped."""
        epoch = self.epoch(0) if step == 0 else self.epoch_of(step)
        lines = [f"{'bucket':>14} {'clips':>9} {'batch size':>11} {'batches':>8} {'shapes':>7}"]
        for number, (clips, batches, shapes) in epoch.table.items():
            entry = self.buckets.entries[number]
            lines.append(
                f"{entry.name:>14} {clips:>9,} {entry.batch_size:>11} {batches:>8,} {shapes:>7}"
            )
        for reason, why in DROPPED.items():
            if count := int((epoch.found == reason).sum()):
                lines.append(f"{'dropped':>14} {count:>9,}  {why}")
        trained = int((epoch.found >= 0).sum())
        lines.append(
            f"epoch {epoch.number}: {trained:,} of {len(epoch.found):,} clips in {len(epoch.steps):,} steps of up to "
            f"{self.micro_batches_per_step} micro-batches"
        )
        return lines

    def _epoch(self, number: int) -> Epoch:
        found, rng = self._assign(number), generator(self.seed, "order", number)
        batches: list[Batch] = []
        table = {}
        members: dict[ClipShape, np.ndarray] = {}
        for place, entry in enumerate(self.buckets.entries):
            if not entry.batch_size:
                continue
            clips, before = np.flatnonzero(found == place), len(batches)
            by_shape = self._by_shape(entry, clips)
            for shape, ids in by_shape.items():
                members[shape] = np.concatenate([members.get(shape, ids[:0]), ids])
                shuffled = rng.permutation(ids).tolist()
                parts = [
                    shuffled[i : i + entry.batch_size] for i in range(0, len(ids), entry.batch_size)
                ]
                batches += [(shape, tuple(part), self.cost(shape, len(part))) for part in parts]
            table[place] = len(clips), len(batches) - before, len(by_shape)
        return Epoch(number, found, self._steps(batches, rng), members, table)

    def _assign(self, epoch: int) -> np.ndarray:
        """The entries of all clips, some at a time: the numbers drawn for millions would fill gigabytes."""
        rng, parts = generator(self.seed, "bucket", epoch), []
        for first in range(0, len(self.num_frames), CLIPS_AT_A_TIME):
            known = [
                column[first : first + CLIPS_AT_A_TIME]
                for column in (self.num_frames, self.height, self.width)
            ]
            draws = rng.random((len(known[0]), len(self.buckets.entries), 2))
            parts.append(self.buckets.assign(*known, interval=self.frame_interval, draws=draws))
        return np.concatenate(parts)

    def _by_shape(self, entry: BucketEntry, clips: np.ndarray) -> dict[ClipShape, np.ndarray]:
        """The clips of an entry, divided by their aspect ratio."""
        sizes, of_clip = np.unique(self.size_of_clip[clips], return_inverse=True)
        shapes = [entry.shape_at(height / width) for height, width in self.sizes[sizes]]
        known = sorted(set(shapes))
        number = np.array([known.index(shape) for shape in shapes], dtype=np.int64)[of_clip]
        return {shape: clips[number == place] for place, shape in enumerate(known)}

    def _steps(self, batches: list[Batch], rng: np.random.Generator) -> list[list[Batch]]:
        """Micro-batches of about equal cost in a step: runs of the order of costs, ties and steps shuffled."""
        shuffled = [batches[place] for place in rng.permutation(len(batches))]
        ordered = sorted(shuffled, key=lambda batch: -batch[2])
        size = self.micro_batches_per_step
        steps = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        return [steps[place] for place in rng.permutation(len(steps))]
