"""Which samples an optimizer step consumes: one sequence of micro-batches, the same for every world.

An optimizer step is a list of at most ``micro_batches_per_step`` micro-batches, each of clips of one shape. Which clips
these are depends on (seed, epoch) and what the set holds, never on processes; only who takes which does (``deal``).
Position in the data is a function of the step, so a resumed run needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from opensora_sp.randomness import generator

from .dataset import ClipShape, Sample


class MicroBatch(NamedTuple):
    """Clips that go through the model together. ``number`` counts from the start of the run and names random draws;
    ``cost`` is an estimate, in units of the plan's own."""

    number: int
    epoch: int
    shape: ClipShape
    ids: tuple[int, ...]
    cost: float

    @property
    def samples(self) -> list[Sample]:
        return [Sample(index, self.epoch, self.shape) for index in self.ids]


class BatchPlan(Protocol):
    """The world-independent sequence, step by step."""

    @property
    def micro_batches_per_step(self) -> int: ...

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps of the first pass over the clips."""

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of an optimizer step."""

    def replacement(self, micro_batch: MicroBatch, index: int, attempt: int) -> int:
        """The clip that stands in for one that cannot be read, at the n-th attempt to find one."""

    def epochs(self, steps: int) -> Iterator[tuple[int, dict[ClipShape, np.ndarray]]]:
        """The clips that the first ``steps`` steps are taken from, in each shape, epoch by epoch."""

    def describe(self, step: int = 0) -> list[str]:
        """The plan from a step on in lines for the log."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """Clips of one shape. Micro-batch ``m`` takes the next ``batch_size`` ids of an epoch's permutation.

    ``too_short`` are ids of clips that have too few frames, as the manifest says: they are left out.

    Raises:
        ValueError: if the set is smaller than one micro-batch.
    """

    num_samples: int
    batch_size: int
    micro_batches_per_step: int
    seed: int
    shape: ClipShape
    too_short: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.clips) < self.batch_size:
            raise ValueError(
                f"got {len(self.clips)} clips{self._left_out()} and batch_size {self.batch_size}; expected at least "
                "one whole batch; add clips or lower batch_size"
            )

    @cached_property
    def clips(self) -> np.ndarray:
        """The ids of the clips that are trained on, in their order."""
        return np.setdiff1d(np.arange(self.num_samples), self.too_short)

    @cached_property
    def micro_batches_per_epoch(self) -> int:
        return len(self.clips) // self.batch_size

    @property
    def steps_per_epoch(self) -> float:
        return self.micro_batches_per_epoch / self.micro_batches_per_step

    def step(self, step: int) -> list[MicroBatch]:
        first = step * self.micro_batches_per_step
        return [
            self._micro_batch(number)
            for number in range(first, first + self.micro_batches_per_step)
        ]

    def _micro_batch(self, number: int) -> MicroBatch:
        epoch, position = divmod(number, self.micro_batches_per_epoch)
        here = slice(position * self.batch_size, (position + 1) * self.batch_size)
        ids = self.clips[_order(self.seed, epoch, len(self.clips))[here]]
        return MicroBatch(number, epoch, self.shape, tuple(ids.tolist()), 1.0)

    def replacement(self, micro_batch: MicroBatch, index: int, attempt: int) -> int:
        drawn = generator(self.seed, "replacement", micro_batch.epoch, index, attempt)
        return int(self.clips[drawn.integers(len(self.clips))])

    def epochs(self, steps: int) -> Iterator[tuple[int, dict[ClipShape, np.ndarray]]]:
        yield 0, {self.shape: self.clips}  # all of them, in each

    def describe(self, step: int = 0) -> list[str]:
        return [
            f"{len(self.clips)} clips{self._left_out()}, {self.micro_batches_per_step} micro-batches of "
            f"{self.batch_size} per step, {self.steps_per_epoch:.1f} steps per epoch"
        ]

    def _left_out(self) -> str:
        if not self.too_short:
            return ""
        count, frames = f"{len(self.too_short)} of {self.num_samples}", self.shape.num_frames
        return f" ({count} left out, too short for {frames} frames)"


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """The clips of an epoch in their order, ``[num_samples]``."""
    return generator(seed, "order", epoch).permutation(num_samples)


def deal(costs: Sequence[float], num_replicas: int) -> list[list[int | None]]:
    """Who takes which micro-batch of a step: a list of places in ``costs`` for each replica, all equally long.

    Replicas average gradients after each micro-batch, so those of one round shall cost the same: rounds are cut out of
    the order of falling costs, dealt forth and back. In the last round some may have none left.
    """
    order: list[int | None] = [*sorted(range(len(costs)), key=lambda place: -costs[place])]
    order += [None] * (-len(order) % num_replicas)
    rounds = [order[first : first + num_replicas] for first in range(0, len(order), num_replicas)]
    turns = [places if number % 2 == 0 else places[::-1] for number, places in enumerate(rounds)]
    return [[places[replica] for places in turns] for replica in range(num_replicas)]


def share(
    micro_batches: Sequence[MicroBatch], replica: int, num_replicas: int
) -> list[MicroBatch | None]:
    """What one replica does in a step, round by round; None where it has no micro-batch left."""
    places = deal([one.cost for one in micro_batches], num_replicas)[replica]
    return [None if place is None else micro_batches[place] for place in places]


class ReplicaBatches:
    """Batch sampler of one replica: what is to be read for its micro-batches from step ``start`` up to step ``stop``.

    ``samples_of`` says what that is for a micro-batch; by default all its samples.
    """

    def __init__(
        self,
        plan: BatchPlan,
        *,
        start: int,
        stop: int,
        replica: int,
        num_replicas: int,
        samples_of: Callable[[MicroBatch], list[Sample]] = lambda micro_batch: micro_batch.samples,
    ) -> None:
        self.plan, self.steps = plan, range(start, stop)
        self.replica, self.num_replicas, self.samples_of = replica, num_replicas, samples_of

    def __iter__(self) -> Iterator[list[Sample]]:
        for step in self.steps:
            for micro_batch in share(self.plan.step(step), self.replica, self.num_replicas):
                if micro_batch is not None:
                    yield self.samples_of(micro_batch)
