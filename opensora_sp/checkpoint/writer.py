"""Checkpoint writer: rank 0 writes tensors that are sharded over ranks, unsharded, synchronously or
in the background.

Rank 0 receives one shard at a time. In addition to the memory of training, a save needs one shard
of one tensor on rank 0; an asynchronous save also needs a CPU copy of each rank's own shards.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.parallel.mesh import host_backend

from .tensor_file import Spec, TensorFile, as_bytes, file_order

logger = logging.getLogger(__name__)
# A full or read-only disk, or missing permissions.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor of a checkpoint.

    Args:
        tensor: if sharded, this rank's slice of the flattened tensor, which is padded at the end so
            that all slices have the same length. Otherwise the whole tensor, the same on all ranks;
            rank 0 writes its own.
        spec: dtype and shape of the whole tensor.
        sharded: each rank holds a part only.
        constant: it does not change during the training, so an asynchronous save needs no copy.
    """

    tensor: Tensor
    spec: Spec
    sharded: bool = False
    constant: bool = False

    @classmethod
    def whole(cls, tensor: Tensor, *, constant: bool = False) -> Part:
        return cls(tensor, Spec.of(tensor), constant=constant)

    def snapshot(self) -> Part:
        """A copy of the part on the CPU, if this rank writes it and training may change it."""
        if self.constant or not (self.sharded or _rank() == 0):
            return self
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """True if no floating-point number in tensors of one device is NaN or infinite.

    Fused over the tensors; the host waits once.
    """
    checked = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    if not checked:
        return True
    # The largest magnitudes; maxima pass NaN on.
    largest = torch._foreach_norm(checked, math.inf)
    return math.isfinite(torch.stack(largest).max().item())


@dataclass
class SaveJob:
    """Files of named tensors and their target.

    Names and specs must be the same on every rank. Rank 0 calls the target's ``begin``,
    ``tensor_file`` for each file, and ``finish``; after an error ``abandon``. All of these have the
    arguments of ``CheckpointFolder``'s.
    """

    target: Any
    files: dict[str, dict[str, Part]] = field(default_factory=dict)

    def snapshot(self) -> SaveJob:
        files = {}
        for file, parts in self.files.items():
            files[file] = {name: part.snapshot() for name, part in parts.items()}
        return SaveJob(self.target, files)

    def parts(self) -> Iterator[Part]:
        """All parts, in the order of the files."""
        for parts in self.files.values():
            for name in file_order(_specs(parts)):
                yield parts[name]


@dataclass(frozen=True)
class Failure:
    """An error of rank 0, as it is sent to the other ranks."""

    message: str
    is_user_error: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            message = (
                f"got '{error.strerror}' while writing {error.filename}; expected free space and "
                "permission to write there; free some space (keep_last=N keeps fewer checkpoints) "
                "or choose another disk, then resume from the newest checkpoint"
            )
            return cls(message, is_user_error=True)
        return cls(f"{error}", is_user_error=isinstance(error, ValueError))

    def raise_(self, task: str) -> None:
        if self.is_user_error:
            raise ValueError(self.message)
        raise RuntimeError(f"rank 0 failed {task}: {self.message}")


class Saver:
    """Saves one job after the other. Creating it and every method are collective.

    An error of the writer is raised on every rank: by ``save``, or after an asynchronous save by
    the next ``save`` or ``wait``. The parts travel in a process group of their own (gloo), so that
    a save in the background and the training's collectives are independent. Without a process group
    there is one process.
    """

    def __init__(self) -> None:
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        # Of torch: a process group, or a number for ranks that are in none.
        self._group: Any = dist.new_group(backend=host_backend()) if self._world > 1 else None
        # One thread, so that saves are written in their order.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint writer")
        self._saving: Future[None] | None = None

    def save(self, job: SaveJob, *, in_background: bool = False) -> None:
        """Write the job, or start to write it, after the previous one is complete."""
        self.wait()
        if in_background:
            self._saving = self._executor.submit(self._run, job.snapshot())
        else:
            self._run(job)

    def non_finite(self, job: SaveJob) -> list[str]:
        """Sharded tensors of a job that hold NaN or infinity, with the rank; equal on all ranks.

        Each rank passes once over its shards, and its host reads one number from the device.
        """
        self.wait()
        shards: dict[str, Tensor] = {}
        for file, parts in job.files.items():
            sharded = {name: part.tensor for name, part in parts.items() if part.sharded}
            shards |= {f"{name} in {file}": tensor for name, tensor in sharded.items()}

        names: list[str] = []
        if not all_finite(shards.values()):
            # By name only where there is one: each of these waits for the device.
            names = [name for name, tensor in shards.items() if not all_finite([tensor])]
        if self._world == 1:
            return names

        names_by_rank: list[list[str]] = [[]] * self._world
        dist.all_gather_object(names_by_rank, names, group=self._group)
        non_finite = []
        for rank, names in enumerate(names_by_rank):
            non_finite += [f"{name} (rank {rank})" for name in names]
        return non_finite

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            ValueError, RuntimeError: what failed on rank 0.
        """
        # Until it is complete it stays known, also to a ``join`` after an interrupt.
        self.join()
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def join(self) -> None:
        """Wait for a save in the background; its error is kept for ``wait``."""
        if self._saving is not None:
            wait([self._saving])

    def _run(self, job: SaveJob) -> None:
        """Rank 0 writes, the others send all of their parts, also after an error of the writer.

        Raises:
            ValueError, RuntimeError: on every rank, what failed on rank 0.
        """
        outcome: list[Any] = [None]
        if _rank() == 0:
            outcome = [self._write(job)]
        else:
            for part in job.parts():
                if part.sharded:
                    # As bytes, which rank 0 appends to the file as they are.
                    dist.send(as_bytes(part.tensor.cpu()), dst=0, group=self._group)

        if self._world > 1:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[0] is not None:
            outcome[0].raise_("saving a checkpoint")

    def _write(self, job: SaveJob) -> Failure | None:
        """On rank 0: write what all ranks send; returns the failure for all of them."""
        chunks = self._receive(job)
        entries = {}
        file: TensorFile | None = None
        try:
            job.target.begin()
            for name, parts in job.files.items():
                file = job.target.tensor_file(name, _specs(parts))
                for tensor in file_order(file.specs):
                    num_chunks = self._world if parts[tensor].sharded else 1
                    file.append(tensor, islice(chunks, num_chunks))
                entries[name] = file.close()
            job.target.finish(entries)
            return None
        except Exception as error:
            logger.error("saving a checkpoint failed: %s", error)
            # The other ranks send the rest as well.
            for _ in chunks:
                pass

            if file is not None:
                # Closed before its folder is removed, and without the flush that would fail again.
                file.abandon()
            with suppress(OSError):
                job.target.abandon()
            return Failure.of(error)

    def _receive(self, job: SaveJob) -> Iterator[Tensor]:
        """On rank 0: the bytes of all tensors, in the order of the files, rank by rank."""
        for part in job.parts():
            local = as_bytes(part.tensor.cpu())
            yield local

            for rank in range(1, self._world if part.sharded else 1):
                yield self._receive_from(rank, local)

    def _receive_from(self, rank: int, like: Tensor) -> Tensor:
        # A variable of the generator would keep one shard while the next one is received.
        received = torch.empty_like(like)
        dist.recv(received, src=rank, group=self._group)
        return received


class on_rank_0:  # noqa: N801  (used like a function)
    """``with on_rank_0(task) as is_rank_0:`` raises the error of rank 0 on every rank."""

    def __init__(self, task: str) -> None:
        self.task = task

    def __enter__(self) -> bool:
        return _rank() == 0

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not dist.is_initialized():
            return

        failure = [None if error is None else Failure.of(error)]
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None and error is None:
            # Rank 0 itself raises the error that left the block.
            failure[0].raise_(self.task)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _specs(parts: Mapping[str, Part]) -> dict[str, Spec]:
    return {name: part.spec for name, part in parts.items()}
