"""Which samples an optimizer step consumes: one sequence of micro-batches, the same for every world.

Micro-batch ``m`` takes the next ``batch_size`` ids of an epoch's permutation, which depends on (seed, epoch) alone. A
step consumes ``micro_batches_per_step`` of them, dealt out to the replicas in turn. Position in the data is a function
of the step, so a resumed run needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opensora_sp.randomness import generator


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """The world-independent sequence of micro-batches.

    Raises:
        ValueError: if the set is smaller than one micro-batch, or replicas would get unequal numbers of them.
    """

    num_samples: int
    batch_size: int
    micro_batches_per_step: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < self.batch_size:
            raise ValueError(
                f"got {self.num_samples} clips and batch_size {self.batch_size}; expected at least one whole batch; "
                "add clips or lower batch_size"
            )

    @property
    def micro_batches_per_epoch(self) -> int:
        return self.num_samples // self.batch_size

    @property
    def samples_per_step(self) -> int:
        """B_global: samples whose mean loss one optimizer step descends."""
        return self.micro_batches_per_step * self.batch_size

    def ids(self, micro_batch: int) -> list[int]:
        """Sample ids of one micro-batch, counted from the start of the run."""
        epoch, position = divmod(micro_batch, self.micro_batches_per_epoch)
        order = generator(self.seed, "order", epoch).permutation(self.num_samples)
        return order[position * self.batch_size : (position + 1) * self.batch_size].tolist()

    def share(self, step: int, replica: int, num_replicas: int) -> list[int]:
        """The micro-batches that one replica takes at a step."""
        check_micro_batches(self.micro_batches_per_step, num_replicas)
        first = step * self.micro_batches_per_step
        return list(range(first + replica, first + self.micro_batches_per_step, num_replicas))


class ReplicaBatches:
    """Batch sampler of one replica from a step on: the ids of its micro-batches, step after step."""

    def __init__(self, plan: MicroBatchPlan, *, start: int, stop: int, replica: int, num_replicas: int) -> None:
        self.plan, self.steps = plan, range(start, stop)
        self.replica, self.num_replicas = replica, num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            for micro_batch in self.plan.share(step, self.replica, self.num_replicas):
                yield self.plan.ids(micro_batch)

    def __len__(self) -> int:
        return len(self.steps) * self.plan.micro_batches_per_step // self.num_replicas


def check_micro_batches(micro_batches_per_step: int, num_replicas: int) -> None:
    """Raise ValueError unless every replica gets the same number of micro-batches per step."""
    if micro_batches_per_step < 1 or micro_batches_per_step % num_replicas:
        raise ValueError(
            f"got micro_batches_per_step {micro_batches_per_step} with {num_replicas} data-parallel replicas; "
            f"expected a multiple of {num_replicas}; change it, or leave it out for one micro-batch per replica"
        )
