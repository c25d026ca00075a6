"""Samples of each optimizer step: one sequence of micro-batches for every world size.

An optimizer step is a list of at most ``micro_batches_per_step`` micro-batches, each of clips of
one shape. Which clips these are depends on (seed, epoch) and the data set, never on the number of
processes. Which replica computes which micro-batch does depend on it (``snake_order``). The
position in the data is a function of the step, so a resumed run needs no other state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from opensora_sp.parallel.rank_groups import RankGroup

from .dataset import ClipShape, Sample
from .randomness import generator


class MicroBatch(NamedTuple):
    """Clips that go through the model together.

    ``number`` counts micro-batches from the start of the run and keys random draws. ``cost`` is an
    estimate of the work, in the plan's own unit. Without ``ids`` it is an idle round, in which a
    replica has nothing to compute. ``bucket`` is the name of its bucket, if there are any.
    """

    number: int
    epoch: int
    shape: ClipShape
    ids: tuple[int, ...]
    cost: float
    bucket: str = ""

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

    def substitute(self, micro_batch: MicroBatch, index: int, attempt: int) -> int:
        """The clip that substitutes a corrupt one, at the n-th attempt to find one."""

    def epochs(self, steps: int) -> Iterator[tuple[int, dict[ClipShape, np.ndarray]]]:
        """For each epoch of the first ``steps`` steps, the clips of each shape."""

    def describe(self, step: int = 0) -> list[str]:
        """The plan from a step on in lines for the log."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """Clips of one shape: micro-batch ``m`` is the next part of an epoch's permutation.

    ``too_short`` are ids of clips that have too few frames according to the manifest. They are
    skipped.

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
            longer = ", or lower dataset.frame_interval or num_frames" if self.too_short else ""
            raise ValueError(
                f"got {len(self.clips)} clips{self._skipped()} and batch_size {self.batch_size}; "
                f"expected at least one whole batch; add clips or lower batch_size{longer}"
            )

    @cached_property
    def clips(self) -> np.ndarray:
        """The ids of the clips that are trained on, in their order."""
        return np.setdiff1d(np.arange(self.num_samples), self.too_short)

    @cached_property
    def micro_batches_per_epoch(self) -> int:
        # The rest of an epoch is left out: a smaller batch would be another shape.
        return len(self.clips) // self.batch_size

    @property
    def steps_per_epoch(self) -> float:
        return self.micro_batches_per_epoch / self.micro_batches_per_step

    def step(self, step: int) -> list[MicroBatch]:
        first = step * self.micro_batches_per_step
        numbers = range(first, first + self.micro_batches_per_step)
        return [self._micro_batch(number) for number in numbers]

    def _micro_batch(self, number: int) -> MicroBatch:
        # From the number alone, so that any step can be the first one of a resumed run.
        epoch, position = divmod(number, self.micro_batches_per_epoch)
        span = slice(position * self.batch_size, (position + 1) * self.batch_size)
        ids = self.clips[_order(self.seed, epoch, len(self.clips))[span]]
        return MicroBatch(number, epoch, self.shape, tuple(ids.tolist()), 1.0)

    def substitute(self, micro_batch: MicroBatch, index: int, attempt: int) -> int:
        # By clip and attempt, so that all ranks find the same one without a message.
        drawn = generator(self.seed, "replacement", micro_batch.epoch, index, attempt)
        return int(self.clips[drawn.integers(len(self.clips))])

    def epochs(self, steps: int) -> Iterator[tuple[int, dict[ClipShape, np.ndarray]]]:
        # Every epoch takes all clips.
        yield 0, {self.shape: self.clips}

    def describe(self, step: int = 0) -> list[str]:
        return [
            f"{len(self.clips)} clips{self._skipped()}, {self.micro_batches_per_step} "
            f"micro-batches of {self.batch_size} per step, {self.steps_per_epoch:.1f} steps per "
            "epoch"
        ]

    def _skipped(self) -> str:
        if not self.too_short:
            return ""
        count, frames = f"{len(self.too_short)} of {self.num_samples}", self.shape.num_frames
        return f" ({count} skipped, too short for {frames} frames)"


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """The clips of an epoch in their order, ``[num_samples]``."""
    return generator(seed, "order", epoch).permutation(num_samples)


def snake_order(costs: Sequence[float], num_replicas: int) -> list[list[int | None]]:
    """For each replica the indices in ``costs`` of its micro-batches, all equally many.

    Replicas average gradients after each micro-batch, so the micro-batches of a round
    shall cost the same. Rounds are cut from the order of decreasing costs and distributed in snake
    order: every second round in reverse. In the last round, replicas without one get None.
    """
    order: list[int | None] = [*sorted(range(len(costs)), key=lambda index: -costs[index])]
    # All replicas run equally many rounds, since each ends in a collective.
    order += [None] * (-len(order) % num_replicas)

    rounds = [order[first : first + num_replicas] for first in range(0, len(order), num_replicas)]
    rounds[1::2] = [indices[::-1] for indices in rounds[1::2]]
    return [[indices[replica] for indices in rounds] for replica in range(num_replicas)]


def micro_batches_of(
    micro_batches: Sequence[MicroBatch], replica: int, num_replicas: int
) -> list[MicroBatch | None]:
    """One replica's micro-batches of a step, round by round; None where it has none left."""
    costs = [micro_batch.cost for micro_batch in micro_batches]
    indices = snake_order(costs, num_replicas)[replica]
    return [None if index is None else micro_batches[index] for index in indices]


class ReadRequest(NamedTuple):
    """Request to a worker to read and draw for a micro-batch.

    ``samples`` are read by this rank, ``latent_size`` is (frames, height, width).
    ``group`` computes the micro-batch; None stands for the replica of a fixed degree.
    """

    micro_batch: MicroBatch
    samples: list[Sample]
    latent_size: tuple[int, int, int] | None = None
    group: RankGroup | None = None


RequestOf = Callable[[MicroBatch, "RankGroup | None"], ReadRequest]
"""Makes the request of a micro-batch and its group, see ``ReadRequest``."""


def whole_request(micro_batch: MicroBatch, group: RankGroup | None = None) -> ReadRequest:
    """The request for all samples of a micro-batch."""
    return ReadRequest(micro_batch, micro_batch.samples, group=group)


class RankBatches:
    """Sampler of one rank: the requests of its micro-batches, step by step.

    Args:
        request_of: the request of a micro-batch; by default for all of its samples.
    """

    def __init__(
        self, plan: BatchPlan, *, start: int, stop: int, request_of: RequestOf = whole_request
    ) -> None:
        self.plan, self.steps, self.request_of = plan, range(start, stop), request_of

    def of_rank(self, step: int) -> Sequence[tuple[MicroBatch, RankGroup | None]]:
        """This rank's micro-batches of a step in their order, with the groups that compute them."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[ReadRequest]:
        for step in self.steps:
            for micro_batch, group in self.of_rank(step):
                yield self.request_of(micro_batch, group)


class ReplicaBatches(RankBatches):
    """Sampler of one replica of a fixed degree.

    Where the replica has no micro-batch left in a step's last round, it requests one without ids,
    of the shape that costs least in this step.
    """

    def __init__(self, plan: BatchPlan, *, replica: int, num_replicas: int, **options: Any) -> None:
        super().__init__(plan, **options)
        self.replica, self.num_replicas = replica, num_replicas

    def of_rank(self, step: int) -> list[tuple[MicroBatch, RankGroup | None]]:
        micro_batches = self.plan.step(step)
        # The cheapest shape, whose zeros the others wait for least.
        idle = min(micro_batches, key=lambda micro_batch: micro_batch.cost)._replace(ids=())
        rounds = micro_batches_of(micro_batches, self.replica, self.num_replicas)
        return [(micro_batch or idle, None) for micro_batch in rounds]
