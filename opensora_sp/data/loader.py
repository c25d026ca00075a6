"""Loading of training data, step by step: items and random draws come with their micro-batch.

The batch sampler decides which samples a micro-batch needs, the workers read them and draw its
random numbers, and all come back together. So the training loop never works out a second time which
micro-batch the items belong to.

On a GPU, batches are pinned by a thread of the ``DataLoader`` and copied one ahead
(``copied_ahead``). In memory at a time are, at most, two batches for each worker on the
host (``prefetch_factor``), and three on the device.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from dataclasses import dataclass
from itertools import count
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset, get_worker_info

from opensora_sp.common.tensors import copied_ahead, map_tensors
from opensora_sp.parallel.rank_groups import RankGroup

from .cache import DamagedRecordError
from .dataset import Sample
from .sampler import MicroBatch, RankBatches, ReadRequest

CPU = torch.device("cpu")
# In which a worker draws and sends what it has read, on a loaded host as well.
GRACE_SECONDS = 30.0
POLL_SECONDS = 5.0
Draw = Callable[[MicroBatch, Any], Any]
"""Draws the random numbers of a micro-batch, whose latents have a size."""


@dataclass(frozen=True)
class LoadedBatch:
    """A micro-batch, the items that this rank has read for it, and its random draws.

    ``group`` computes it; None stands for the replica of a fixed degree. ``error`` is why it cannot
    be used. The rank raises it: an exception of a worker would carry the worker's traceback. In
    training ``items`` are ``Clip``s, or of a cache ``CachedClip``s, or ``CorruptSample``s, and
    ``draws`` are ``features.batch.Draws``.
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


class MicroBatchReader(Dataset[LoadedBatch]):
    """Answers a ``ReadRequest``, with one item for each sample.

    Args:
        progress: shared float64 ``[2 * num_workers]``: of each worker the clip that it reads, and
            since when, by the monotonic clock.
    """

    def __init__(self, dataset: Dataset[Any], draw: Draw, progress: MutableSequence[float]) -> None:
        self.dataset, self.draw, self.progress = dataset, draw, progress

    def _read(self, sample: Sample) -> Any:
        worker = get_worker_info()
        if worker is not None:
            self.progress[2 * worker.id : 2 * worker.id + 2] = [sample.clip, time.monotonic()]
        return self.dataset[sample]

    def __getitem__(self, request: ReadRequest) -> LoadedBatch:
        try:
            items = [self._read(sample) for sample in request.samples]
        except DamagedRecordError as error:
            return LoadedBatch(request.micro_batch, [], None, str(error))
        draws = self.draw(request.micro_batch, request.latent_size)
        return LoadedBatch(request.micro_batch, items, draws, group=request.group)


class RequestLoader:
    """Answers ``ReadRequest``s in their order, by worker processes.

    Args:
        dataset: indexed by ``Sample``; its ``rows`` name the file of a clip.
        num_workers: processes that read and draw; 0 reads and draws in this one.
        seed: of the generator from which workers are seeded, so that the global one stays
            untouched.
        draw: what workers call for the random numbers of a micro-batch; by default there are none.
        device: to which ``StepLoader`` copies tensors; for a GPU they are pinned.
        worker_init_fn: called in each worker with its number.
        time_limit: seconds that opening and decoding a clip may take; a worker that makes no
            progress for twice as long, and ``GRACE_SECONDS``, ends the iteration in a ValueError.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        requests: Iterable[ReadRequest],
        *,
        num_workers: int,
        seed: int,
        draw: Draw = lambda micro_batch, latent_size: None,
        device: torch.device = CPU,
        worker_init_fn: Callable[[int], None] | None = None,
        time_limit: float = 60.0,
    ) -> None:
        self.dataset, self.num_workers, self.device = dataset, num_workers, device
        # Longer than a clip may take: a slow file is a corrupt sample, and no stuck worker.
        self.patience = 2 * time_limit + GRACE_SECONDS
        self._poll_seconds = min(POLL_SECONDS, self.patience)
        # Without a lock, which a worker that is killed would keep.
        self._progress = RawArray("d", 2 * num_workers)
        self._workers: set[BaseProcess] = set()

        self._loader: DataLoader[LoadedBatch] = DataLoader(
            MicroBatchReader(dataset, draw, self._progress),
            batch_size=None,
            # A request is a whole micro-batch, so collation is left out (batch_size=None).
            sampler=requests,
            num_workers=num_workers,
            # Of each wait, after which progress is looked at.
            timeout=self._poll_seconds if num_workers else 0,
            # Python 3.14 would start them from a server: each imports all anew, outlives a killed
            # rank for a while, and data sets and draws would have to be pickled.
            multiprocessing_context="fork" if num_workers else None,
            pin_memory=device.type == "cuda",
            worker_init_fn=worker_init_fn,
            generator=torch.Generator().manual_seed(seed),
        )

    def answers(self) -> Iterator[LoadedBatch]:
        """What workers read, in turns; they start at once, not with the first answer."""
        # DataLoader does not publish its workers.
        others = set(active_children())
        loaded = iter(self._loader)
        self._workers |= set(active_children()) - others
        return self._received(loaded)

    def _received(self, loaded: Iterator[LoadedBatch]) -> Iterator[LoadedBatch]:
        """Raises ValueError if the worker whose turn it is makes no progress."""
        for number in count():
            worker = number % max(1, self.num_workers)
            silent, last = 0.0, None
            batch = None
            while batch is None:
                try:
                    batch = next(loaded)
                except StopIteration:
                    return
                except RuntimeError as error:
                    # ``DataLoader`` has no class for it.
                    if not str(error).startswith("DataLoader timed out"):
                        raise
                    # Waits are added up: while this process is suspended, workers are as well.
                    progress = self._progress[2 * worker : 2 * worker + 2]
                    silent = silent + self._poll_seconds if progress == last else 0.0
                    last = progress
                    if silent > self.patience:
                        raise self._stuck(worker, silent) from None
            yield batch

    def _stuck(self, worker: int, seconds: float) -> ValueError:
        clip = int(self._progress[2 * worker])
        # ``DataLoader`` would wait for it again.
        self.close()
        path = self.dataset.rows[clip].path  # type: ignore[attr-defined]
        return ValueError(
            f"got nothing from worker {worker} of the loader for {seconds:.0f} s, since it has "
            f"begun to read {str(path)!r}; expected a clip within dataset.time_limit; look whether "
            "the process is stopped and its disk answers, and start again"
        )

    def close(self) -> None:
        """Ask all workers to end at once; a ``DataLoader`` would wait 5 s for each busy one.

        They have to exit with status 0 then, as ``runtime.processes.init_worker`` makes them do.
        """
        for worker in self._workers:
            worker.terminate()
            # A stopped one would never end.
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, signal.SIGCONT)


class StepLoader(RequestLoader):
    """Iterates over the optimizer steps of ``batches``, as ``StepBatches``.

    A step's ``loaded`` must be exhausted before the next step is asked for. ``waited`` adds up the
    seconds in which the training waited for the workers.

    Args:
        options: see ``RequestLoader``.
    """

    def __init__(self, dataset: Dataset[Any], batches: RankBatches, **options: Any) -> None:
        super().__init__(dataset, batches, **options)
        self.batches, self.waited = batches, 0.0

    def __iter__(self) -> Iterator[StepBatches]:
        """Starts the workers at once, not with the first step."""
        return self._steps(copied_ahead(self.answers(), self.device))

    def _steps(self, loaded: Iterator[LoadedBatch]) -> Iterator[StepBatches]:
        for step in self.batches.steps:
            micro_batches = self.batches.plan.step(step)
            num_requests = len(self.batches.of_rank(step))
            yield StepBatches(micro_batches, self._timed(loaded, num_requests))

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
