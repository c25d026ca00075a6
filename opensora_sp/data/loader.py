"""Loading of training data, step by step: items and random draws come with their micro-batch.

The batch sampler decides which samples a micro-batch needs, the workers read them and draw its
random numbers, and all come back together. So the training loop never works out a second time which
micro-batch the items belong to.

On a GPU, batches are pinned by a thread of the ``DataLoader`` and copied one ahead
(``transfer.copied_ahead``). In memory at a time are, at most, two batches for each worker on the
host (``prefetch_factor``), and three on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

from opensora_sp.common.tensors import copied_ahead, map_tensors
from opensora_sp.parallel.rank_groups import RankGroup

from .cache_files import DamagedRecordError
from .sampler import MicroBatch, RankBatches, ReadRequest

CPU = torch.device("cpu")
Draw = Callable[[MicroBatch, Any], Any]
"""Draws the random numbers of a micro-batch, whose latents have a size."""


@dataclass(frozen=True)
class LoadedBatch:
    """A micro-batch, the items that this rank has read for it, and its random draws.

    ``group`` computes it; None stands for the replica of a fixed degree. ``error`` is why it cannot
    be used. The rank raises it: an exception of a worker would carry the worker's traceback.
    """

    micro_batch: MicroBatch
    items: list[Any]
    draws: Any
    error: str | None = None
    group: RankGroup | None = None

    def pin_memory(self) -> LoadedBatch:
        """Called by the ``DataLoader``."""
        pinned: LoadedBatch = map_tensors(Tensor.pin_memory, self)
        return pinned


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step: the micro-batches of all ranks, and those loaded for this one."""

    micro_batches: list[MicroBatch]
    loaded: Iterator[LoadedBatch]

    @property
    def num_samples(self) -> int:
        """Samples of the step, of all ranks together."""
        return sum(len(micro_batch.ids) for micro_batch in self.micro_batches)


class MicroBatchReader(Dataset[LoadedBatch]):
    """Answers a ``ReadRequest``, with one item for each sample."""

    def __init__(self, dataset: Dataset[Any], draw: Draw) -> None:
        self.dataset, self.draw = dataset, draw

    def __getitem__(self, request: ReadRequest) -> LoadedBatch:
        try:
            items = [self.dataset[sample] for sample in request.samples]
        except DamagedRecordError as error:
            return LoadedBatch(request.micro_batch, [], None, str(error))
        draws = self.draw(request.micro_batch, request.latent_size)
        return LoadedBatch(request.micro_batch, items, draws, group=request.group)


class StepLoader:
    """Iterates over the optimizer steps of ``batches``, as ``StepBatches``.

    A step's ``loaded`` must be exhausted before the next step is asked for. ``waited`` adds up the
    seconds in which the training waited for the workers.

    Args:
        dataset: indexed by ``Sample``.
        num_workers: processes that read and draw; 0 reads and draws in this one.
        seed: of the generator from which workers are seeded, so that the global one stays
            untouched.
        draw: what workers call for the random numbers of a micro-batch; by default there are none.
        device: to which tensors are copied.
        worker_init_fn: called in each worker with its number.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: RankBatches,
        *,
        num_workers: int,
        seed: int,
        draw: Draw = lambda micro_batch, latent_size: None,
        device: torch.device = CPU,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.batches, self.device = batches, device
        self.waited = 0.0
        self._workers: set[BaseProcess] = set()

        self._loader: DataLoader[LoadedBatch] = DataLoader(
            MicroBatchReader(dataset, draw),
            batch_size=None,
            sampler=batches,
            num_workers=num_workers,
            # Python 3.14 would start them from a server: each imports all anew, outlives a killed
            # rank for a while, and data sets and draws would have to be pickled.
            multiprocessing_context="fork" if num_workers else None,
            pin_memory=device.type == "cuda",
            worker_init_fn=worker_init_fn,
            generator=torch.Generator().manual_seed(seed),
        )

    def __iter__(self) -> Iterator[StepBatches]:
        """Starts the workers at once, not with the first step."""
        # DataLoader does not publish its workers.
        others = set(active_children())
        loaded = iter(self._loader)
        self._workers |= set(active_children()) - others
        return self._steps(copied_ahead(loaded, self.device))

    def close(self) -> None:
        """Ask all workers to end at once; a ``DataLoader`` would wait 5 s for each busy one.

        They have to exit with status 0 then, as ``runtime.processes.init_worker`` makes them do.
        """
        for worker in self._workers:
            worker.terminate()

    def _steps(self, loaded: Iterator[LoadedBatch]) -> Iterator[StepBatches]:
        for step in self.batches.steps:
            micro_batches = self.batches.plan.step(step)
            yield StepBatches(micro_batches, self._timed(loaded, self.batches.count(step)))

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
            # On the rank itself: a worker's exception would come with the worker's traceback.
            if batch.error is not None:
                raise ValueError(batch.error)
            yield batch
