"""Batch sizes that fit: for each bucket one whose step fits into memory and takes as long as the
steps of the other buckets.

Memory decides on the largest batch of a bucket, with everything recomputed if need be. Of the times
that these batches take, the common one is that which most of these buckets can take; among equals,
the longest. Each bucket then gets the batch that comes closest to it without taking longer, and
keeps as many activations as still fit (``memory.py``). Where ranks share a batch, multiples
of their number are preferred: then each rank holds whole clips, and nothing is sent.

For one shape and level of gradient checkpointing, memory is affine in the number of clips, within
0.5 %. So two batch sizes are traced, and the others are on the line through them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import NamedTuple

from opensora_sp.config import TrainConfig
from opensora_sp.data.buckets import BatchSpec
from opensora_sp.models.recompute import EVERYTHING, OFFLOADED
from opensora_sp.parallel.cost_model import CostModel

from .bucket_levels import ranks_of_bucket
from .memory import memory_for
from .run_estimator import Estimate, Memory, RunEstimator
from .trace import Activations

TOLERANCE = 0.1
"""Share of the common time by which the time of a bucket may differ."""
LARGEST_BATCH = 512
"""Clips of a batch that are never exceeded, unless another limit is passed."""

TRACED = 1, 32  # whole clips of a rank, in the two batches that are traced
MEMORY, TIME, LIMIT = "memory", "time", "largest batch"


@dataclass(frozen=True)
class FittedBatch:
    """The batch that was chosen for a bucket.

    Attributes:
        name: of the bucket, as ``BucketEntry.name``.
        batch: its size and shape; of a bucket at 16:9.
        ranks: that share it.
        memory: of the busiest rank, and what each block keeps.
        seconds: predicted for the micro-batch on the busiest rank.
        decided_by: "memory", "time" or "largest batch": what excludes a larger batch.
        deviation: of ``seconds`` from the common time; 0.2 is 20 % longer.
    """

    name: str
    batch: BatchSpec
    ranks: int
    memory: Memory
    seconds: float
    decided_by: str
    deviation: float


@dataclass(frozen=True)
class Fit:
    """Batches that fit into ``memory`` bytes of each device, of which ``communicators`` are taken
    by all but the largest; ``seconds`` is the common time.
    """

    memory: float
    communicators: float
    seconds: float
    batches: list[FittedBatch]

    @property
    def sizes(self) -> dict[str, int]:
        """The batch size of each bucket by its name."""
        return {fitted.name: fitted.batch.batch_size for fitted in self.batches}


def fit(
    cfg: TrainConfig,
    num_gpus: int,
    memory: float,
    *,
    names: Iterable[str] | None = None,
    gpus_per_node: int | None = None,
    device: str = "cuda",
    cost_model: CostModel | None = None,
    largest_batch: int = LARGEST_BATCH,
    progress: Callable[[list[str]], Iterable[str]] = iter,
) -> Fit:
    """Choose batch sizes for the buckets of a config, or for its one shape.

    Args:
        memory: bytes of a device. A step may take ``memory.budget_of`` of it, less all
            but the largest communicator of a rank.
        names: of the buckets; None is all of them.
        gpus_per_node: by which exchanges use the network.
        device: "cuda" or "cpu".
        cost_model: rates by which times are predicted; None is the config's, or an H100's.
        largest_batch: clips of a batch that are never exceeded.
        progress: iterates over the names and may show how far it is.

    Raises:
        ValueError: if a bucket has no batch that fits, with the least memory that one clip takes.
    """
    estimator = LineEstimator(
        cfg, num_gpus, memory, device=device, rates=cost_model, gpus_per_node=gpus_per_node
    )
    batches = cfg.batches()
    chosen = list(batches) if names is None else list(names)

    buckets, lacking = {}, {}
    for name in progress(chosen):
        ranks = ranks_of_bucket(name, replace(batches[name], batch_size=1), estimator)
        bucket = _Bucket(estimator, batches[name], ranks, largest_batch)
        if not bucket.largest:
            # One clip, of which as little as possible is kept on the device.
            lowest = estimator.lowest_levels[-1]
            needed = estimator.peak(bucket.latents(1), ranks, lowest).needed
            lacking[name] = memory_for(needed) + memory - estimator.memory
        buckets[name] = bucket
    _check_all_fit(lacking, memory)

    # Buckets that only the limit keeps short, such as small images, do not shorten the others.
    by_memory = [bucket for bucket in buckets.values() if not bucket.is_limited]
    deciding = by_memory or list(buckets.values())
    common = common_time([bucket.times for bucket in deciding])
    fitted = [bucket.fitted(name, common) for name, bucket in buckets.items()]
    return Fit(memory, memory - estimator.memory, common, fitted)


class LineEstimator(RunEstimator):
    """Traces two batches of whole clips on each rank; others are on the line through them."""

    def activations(self, latents: tuple[int, ...], ranks: int, level: int) -> Activations:
        num_clips, *size = latents
        trace = super().activations
        # Where ranks hold parts of clips, memory is no line: strategies differ.
        if num_clips % ranks:
            return trace(latents, ranks, level)

        low, high = (trace((number * ranks, *size), ranks, level) for number in TRACED)
        position = (num_clips / ranks - TRACED[0]) / (TRACED[1] - TRACED[0])
        ends = zip(astuple(low), astuple(high), strict=True)
        return Activations(*(first + position * (last - first) for first, last in ends))


class Times(NamedTuple):
    """Seconds of a bucket's shortest and longest micro-batch."""

    shortest: float
    longest: float


class _Bucket:
    """The batch sizes of one bucket on ``ranks`` ranks."""

    def __init__(
        self, estimator: RunEstimator, batch: BatchSpec, ranks: int, largest_batch: int
    ) -> None:
        self.estimator = estimator
        self.batch, self.ranks, self.limit = batch, ranks, largest_batch
        self._steps: dict[int, Estimate] = {}

    @cached_property
    def largest(self) -> int:
        """The largest batch that fits; 0 if one clip does not."""
        whole = _last(range(self.ranks, self.limit + 1, self.ranks), self.fits)
        return whole or _last(range(1, min(self.ranks, self.limit + 1)), self.fits)

    @property
    def is_limited(self) -> bool:
        """True if the limit on clips, and not memory, decides on the largest batch."""
        return self.largest + self.ranks > self.limit

    @cached_property
    def times(self) -> Times:
        """Seconds of the shortest batch, which recomputes little, and of the largest one."""
        levels = self.estimator.lowest_levels[0]
        if self.estimator.checkpointing == "auto":
            levels = [EVERYTHING]
        shortest = [
            self.estimator.seconds(self.latents(size), self.ranks, levels)
            for size in (1, self.ranks)
        ]
        return Times(min(shortest), self.step(self.largest).seconds)

    def fits(self, size: int) -> bool:
        """True if a batch fits. Inputs of blocks leave the device for a single clip only."""
        memory = self.step(size).memory
        may_offload = size == 1 or self.estimator.checkpointing != "auto"
        # Copying inputs to the host takes time, which a smaller batch would not need.
        offloads = OFFLOADED in memory.levels
        return memory.peak.needed <= self.estimator.budget and (may_offload or not offloads)

    def step(self, size: int) -> Estimate:
        """A micro-batch of this size, which keeps as much as fits."""
        # A trace takes seconds, and the search asks for some sizes again.
        if size not in self._steps:
            self._steps[size] = self.estimator.estimate(self.latents(size), self.ranks)
        return self._steps[size]

    def fitted(self, name: str, common: float) -> FittedBatch:
        """The batch whose step comes closest to the common time without taking longer."""
        size = self._size_for(common)
        step, decided_by = self.step(size), TIME
        if size == self.largest:
            decided_by = LIMIT if self.is_limited else MEMORY
        return FittedBatch(
            name,
            replace(self.batch, batch_size=size),
            self.ranks,
            step.memory,
            step.seconds,
            decided_by,
            deviation=step.seconds / common - 1,
        )

    def _size_for(self, common: float) -> int:
        # Small batches may all take as long: the host needs it to launch their operators.
        limit = max(common, self.times.shortest)

        def is_short(size: int) -> bool:
            return self.step(size).seconds <= limit and self.fits(size)

        whole = _last(range(self.ranks, self.largest + 1, self.ranks), is_short)
        # Short of the common time, a few clips more are worth an exchange.
        if whole and self.step(whole).seconds >= (1 - TOLERANCE) * common:
            return whole
        longer = range(whole + 1, min(whole + self.ranks, self.largest + 1))
        return _last(longer, is_short) or whole or 1

    def latents(self, size: int) -> tuple[int, ...]:
        return self.estimator.latents(replace(self.batch, batch_size=size))


def common_time(buckets: Sequence[Times]) -> float:
    """The longest step of a bucket whose time most buckets can take, among equals the longest."""

    def preference(seconds: float) -> tuple[int, float]:
        too_short = sum(times.longest < (1 - TOLERANCE) * seconds for times in buckets)
        too_long = sum(times.shortest > (1 + TOLERANCE) * seconds for times in buckets)
        return too_short + too_long, -seconds

    return min((times.longest for times in buckets), key=preference)


def _check_all_fit(lacking: Mapping[str, float], memory: float) -> None:
    if not lacking:
        return
    listed = ", ".join(f"{name} ({_in_gb(needed)} GB)" for name, needed in lacking.items())
    raise ValueError(
        f"got {memory / 1e9:g} GB of a device, into which not one clip fits of these buckets: "
        f"{listed}; expected at least {_in_gb(max(lacking.values()))} GB; raise the bound or "
        "sp_size, or take these buckets out"
    )


def _in_gb(number: float) -> str:
    """Rounded up, so that the printed size suffices."""
    return f"{-(-number // 1e7) / 100:.2f}"


def _last(sizes: range, holds: Callable[[int], bool]) -> int:
    """The last of ascending sizes up to which something holds; 0 if it holds for none."""
    # Bisected, since each answer is a trace.
    count = bisect_left(sizes, True, key=lambda size: not holds(size))
    return sizes[count - 1] if count else 0
