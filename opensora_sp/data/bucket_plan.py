"""The sequence of micro-batches of a bucketed set.

In each epoch, every clip is assigned to a bucket or dropped (``Buckets``). Each bucket is shuffled
and cut into micro-batches, the last of which may be smaller. In the order ``by_cost``, all
micro-batches are sorted by cost and cut into steps, and the steps are shuffled, so that the
micro-batches of a step cost about the same. In the order ``mixed``, all micro-batches are shuffled
and cut into steps, so that a step has the mix of the set.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Literal

import numpy as np

from .buckets import DROPPED, BucketEntry, Buckets
from .dataset import ClipShape
from .manifest import Manifest
from .randomness import generator
from .sampler import MicroBatch

Cost = Callable[[ClipShape, int], float]
"""Estimated work of a micro-batch: ``cost(shape, clips)``."""
BatchOrder = Literal["by_cost", "mixed"]
CLIPS_PER_CHUNK = 1 << 16
# Substitutes that are looked for in a clip's own bucket, before any file that is long enough is
# used.
SAME_BUCKET_ATTEMPTS = 5


@dataclass(frozen=True)
class Epoch:
    """One pass over the clips."""

    number: int
    entry_of_clip: np.ndarray  # [N], the entry of each clip, or a key of ``DROPPED``
    steps: list[list[MicroBatch]]  # not yet numbered
    members: dict[ClipShape, np.ndarray]  # ids of the clips of a shape


class BucketPlan:
    """A ``BatchPlan`` over buckets.

    The number of steps differs from epoch to epoch where keep probabilities draw; the last step of
    some epochs has fewer micro-batches. Steps are numbered through all epochs.

    Args:
        rows: manifest with ``num_frames``, ``height`` and ``width``.
        bucket_config: see ``buckets``.
        micro_batches_per_step, seed: see ``sampler``.
        cost: estimate by which micro-batches are grouped into steps.
        batch_order: of the micro-batches of an epoch, "by_cost" or "mixed".
        may_be_empty: accept that no clip is in any bucket.

    Raises:
        ValueError: if no clip is in any bucket and ``may_be_empty`` is False; the message has the
            table of ``describe``.
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
        batch_order: BatchOrder = "by_cost",
        may_be_empty: bool = False,
    ) -> None:
        self.buckets = Buckets.of(bucket_config)
        if unknown := self.buckets.without_batch_size:
            raise ValueError(
                f"got bucket_config without the batch size of {', '.join(unknown)}, which only a "
                "training chooses at its start; expected numbers; write them with opensora-sp plan "
                "CONFIG --fit 80GB"
            )
        self.micro_batches_per_step = micro_batches_per_step
        self.frame_interval, self.seed, self.cost = frame_interval, seed, cost
        self.batch_order = batch_order

        self.num_frames = rows.column("num_frames")
        self.height, self.width = rows.column("height"), rows.column("width")
        sizes, inverse = np.unique(np.stack([self.height, self.width]), axis=1, return_inverse=True)
        self.sizes, self.size_of_clip = sizes.T, inverse.reshape(-1)  # [U, 2], [N]

        # Two, since workers read ahead into the next epoch.
        self.epoch = lru_cache(maxsize=2)(self._epoch)
        # First step of each epoch so far, and of the next one.
        self._starts = [0]
        if not self.epoch(0).steps and not may_be_empty:
            table = "\n".join(self.describe())
            raise ValueError(
                f"got no clip for any bucket in epoch 0 of {str(rows.file)!r}:\n{table}\n"
                "expected at least one; change bucket_config, or add longer or larger clips"
            )

    @property
    def fingerprint(self) -> str:
        """A checksum of the buckets and the clips, to be compared on resume. The rule that assigns
        clips to buckets is not in it: a run resumes with the rule of its code.
        """
        options = repr((self.frame_interval, self.buckets.entries)).encode()
        columns = (self.num_frames, self.height, self.width)
        return f"{zlib.crc32(options + b''.join(c.tobytes() for c in columns)):08x}"

    @property
    def steps_per_epoch(self) -> float:
        return len(self.epoch(0).steps)

    def step(self, step: int) -> list[MicroBatch]:
        epoch = self.epoch_of(step)
        first = step * self.micro_batches_per_step
        micro_batches = epoch.steps[step - self._starts[epoch.number]]
        return [
            micro_batch._replace(number=number)
            for number, micro_batch in enumerate(micro_batches, first)
        ]

    def epoch_of(self, step: int) -> Epoch:
        while self._starts[-1] <= step:
            self._starts.append(self._starts[-1] + len(self.epoch(len(self._starts) - 1).steps))
        return self.epoch(bisect.bisect_right(self._starts, step) - 1)

    def substitute(self, micro_batch: MicroBatch, index: int, attempt: int) -> int:
        """A clip of the same bucket; after some attempts any file that is long enough to be cut."""
        shape = micro_batch.shape
        pool = self.epoch(micro_batch.epoch).members[shape]
        if attempt >= SAME_BUCKET_ATTEMPTS or len(pool) == 1:
            span = (shape.num_frames - 1) * self.frame_interval + 1
            pool = np.flatnonzero(self.num_frames >= span)
        drawn = generator(self.seed, "replacement", micro_batch.epoch, index, attempt)
        return int(pool[drawn.integers(len(pool))])

    def epochs(self, steps: int) -> Iterator[tuple[int, dict[ClipShape, np.ndarray]]]:
        """The clips of each shape, in the epochs of the first ``steps`` steps."""
        for number in range(self.epoch_of(steps - 1).number + 1):
            yield number, self.epoch(number).members

    @cached_property
    def buckets_with_clips(self) -> set[str]:
        """Names of the buckets that clips fall into in some epoch, whatever is drawn."""
        numbers = self.buckets.possible(
            self.num_frames, self.height, self.width, interval=self.frame_interval
        )
        return {self.buckets.entries[number].name for number in numbers}

    def describe(self, step: int = 0) -> list[str]:
        """The report before training: the contents of each bucket, and why clips were dropped."""
        epoch = self.epoch(0) if step == 0 else self.epoch_of(step)
        lines = [f"{'bucket':>14} {'clips':>9} {'batch size':>11} {'batches':>8} {'shapes':>7}"]
        shapes: dict[str, list[ClipShape]] = {}
        for micro_batch in chain.from_iterable(epoch.steps):
            shapes.setdefault(micro_batch.bucket, []).append(micro_batch.shape)
        for number, entry in enumerate(self.buckets.entries):
            if entry.batch_size:
                clips, cut_to = (epoch.entry_of_clip == number).sum(), shapes.get(entry.name, [])
                lines.append(
                    f"{entry.name:>14} {clips:>9,} {entry.batch_size:>11} {len(cut_to):>8,} "
                    f"{len(set(cut_to)):>7}"
                )

        for reason, why in DROPPED.items():
            if count := int((epoch.entry_of_clip == reason).sum()):
                lines.append(f"{'dropped':>14} {count:>9,}  {why}")
        trained = int((epoch.entry_of_clip >= 0).sum())
        lines.append(
            f"epoch {epoch.number}: {trained:,} of {len(epoch.entry_of_clip):,} clips in "
            f"{len(epoch.steps):,} steps of up to {self.micro_batches_per_step} micro-batches"
        )
        return lines

    def _epoch(self, number: int) -> Epoch:
        entry_of_clip, rng = self._assign(number), generator(self.seed, "order", number)
        micro_batches: list[MicroBatch] = []
        members: dict[ClipShape, np.ndarray] = {}
        # Entries in their fixed order: each draws from the generator where the one before ended.
        for index, entry in enumerate(self.buckets.entries):
            if not entry.batch_size:
                continue
            clips = np.flatnonzero(entry_of_clip == index)
            for shape, ids in self._by_shape(entry, clips).items():
                members[shape] = np.concatenate([members.get(shape, ids[:0]), ids])
                shuffled = rng.permutation(ids).tolist()
                for first in range(0, len(ids), entry.batch_size):
                    part = tuple(shuffled[first : first + entry.batch_size])
                    cost = self.cost(shape, len(part))
                    micro_batches.append(MicroBatch(0, number, shape, part, cost, entry.name))

        steps = cut_into_steps(micro_batches, rng, self.batch_order, self.micro_batches_per_step)
        return Epoch(number, entry_of_clip, steps, members)

    def _assign(self, epoch: int) -> np.ndarray:
        """The entry of each clip, in chunks: draws for millions of clips would fill gigabytes."""
        rng, parts = generator(self.seed, "bucket", epoch), []
        columns = np.stack([self.num_frames, self.height, self.width])
        for first in range(0, len(self.num_frames), CLIPS_PER_CHUNK):
            num_frames, height, width = columns[:, first : first + CLIPS_PER_CHUNK]
            draws = rng.random((len(num_frames), len(self.buckets.entries), 2))
            parts.append(
                self.buckets.assign(
                    num_frames, height, width, interval=self.frame_interval, draws=draws
                )
            )
        return np.concatenate(parts)

    def _by_shape(self, entry: BucketEntry, clips: np.ndarray) -> dict[ClipShape, np.ndarray]:
        """The clips of an entry, divided by their aspect ratio."""
        # Sets have far fewer sizes than clips.
        sizes, inverse = np.unique(self.size_of_clip[clips], return_inverse=True)
        shapes = [entry.shape_at(height / width) for height, width in self.sizes[sizes]]
        known = sorted(set(shapes))
        number = np.array([known.index(shape) for shape in shapes], dtype=np.int64)[inverse]
        return {shape: clips[number == index] for index, shape in enumerate(known)}


def cut_into_steps(
    micro_batches: list[MicroBatch],
    rng: np.random.Generator,
    order: BatchOrder,
    micro_batches_per_step: int,
) -> list[list[MicroBatch]]:
    """Steps cut from the micro-batches in their order.

    By cost, ties and steps are shuffled. Of mixed steps, the last one may be smaller.
    """
    # Sorting is stable, so this shuffles ties.
    ordered = [micro_batches[index] for index in rng.permutation(len(micro_batches))]
    if order == "by_cost":
        ordered.sort(key=lambda micro_batch: -micro_batch.cost)
    size = micro_batches_per_step
    steps = [ordered[first : first + size] for first in range(0, len(ordered), size)]
    if order == "mixed":
        return steps
    return [steps[index] for index in rng.permutation(len(steps))]
