"""Loading of training data, step by step: items come together with their micro-batch.

The batch sampler decides which samples a micro-batch needs, the workers read them, and both come
back together. So the training loop never works out a second time which micro-batch the items belong
to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

from .dataset import Sample
from .sampler import MicroBatch, ReplicaBatches

LoadedBatch = tuple[MicroBatch, list[Any]]
"""A micro-batch, and the items that were read for it: those that this rank asked for."""


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step: the micro-batches of all replicas, and those loaded for this one."""

    micro_batches: list[MicroBatch]
    loaded: Iterator[LoadedBatch]

    @property
    def num_samples(self) -> int:
        """Samples of the step, of all replicas together."""
        return sum(len(micro_batch.ids) for micro_batch in self.micro_batches)


class MicroBatchReader(Dataset[LoadedBatch]):
    """Reads ``(micro_batch, samples)`` as ``(micro_batch, items)``, one item for each sample."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, request: tuple[MicroBatch, list[Sample]]) -> LoadedBatch:
        micro_batch, samples = request
        return micro_batch, [self.dataset[sample] for sample in samples]


class StepLoader:
    """Iterates over the optimizer steps of ``batches``, as ``StepBatches``.

    A step's ``loaded`` must be exhausted before the next step is asked for. ``waited`` adds up the
    seconds in which the training waited for the workers.

    Args:
        dataset: indexed by ``Sample``.
        num_workers: processes that read; 0 reads in this one.
        seed: of the generator from which workers are seeded, so that the global one stays
            untouched.
        worker_init_fn: called in each worker with its number.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: ReplicaBatches,
        *,
        num_workers: int,
        seed: int,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.batches = batches
        self.waited = 0.0
        self._loader: DataLoader[LoadedBatch] = DataLoader(
            MicroBatchReader(dataset),
            batch_size=None,
            sampler=batches,
            # In the place of torch's conversion, which would turn tuples into lists.
            collate_fn=tuple,
            num_workers=num_workers,
            worker_init_fn=worker_init_fn,
            generator=torch.Generator().manual_seed(seed),
        )

    def __iter__(self) -> Iterator[StepBatches]:
        """Starts the workers at once, not with the first step."""
        return self._steps(iter(self._loader))

    def _steps(self, loaded: Iterator[LoadedBatch]) -> Iterator[StepBatches]:
        for step in self.batches.steps:
            micro_batches = self.batches.plan.step(step)
            rounds = self.batches.rounds(micro_batches)
            yield StepBatches(micro_batches, self._timed(loaded, rounds))

    def take_waited(self) -> float:
        """Seconds waited since the last call."""
        seconds, self.waited = self.waited, 0.0
        return seconds

    def _timed(self, loaded: Iterator[LoadedBatch], count: int) -> Iterator[LoadedBatch]:
        for _ in range(count):
            start = time.perf_counter()
            with record_function("data"):
                batch = next(loaded)
            self.waited += time.perf_counter() - start
            yield batch
