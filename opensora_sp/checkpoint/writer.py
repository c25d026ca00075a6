"""Tensors sharded over ranks, written as whole ones by rank 0, synchronously or in the background.

Rank 0 receives one part after the other. Beyond the training's own memory it needs one part of one
tensor; an asynchronous save needs one copy of each rank's own parts.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.process_groups import host_backend

from .tensor_file import Spec, TensorFile, as_bytes, file_order

logger = logging.getLogger(__name__)
# A full or read-only disk, or missing permissions.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor of a checkpoint.

    Args:
        tensor: if sharded, this rank's run of the flattened tensor, padded at the end of the tensor
            to the same length on all ranks. Otherwise the whole tensor, the same on every rank;
            rank 0 writes its own.
        spec: dtype and shape of the whole tensor.
        sharded: whether each rank holds a part only.
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
        """The part with a copy on the CPU, if this rank gives it and it may change."""
        if self.constant or not (self.sharded or _rank() == 0):
            return self
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True))


class Target(Protocol):
    """Where rank 0 writes: ``begin``, the files, then ``finish``; ``abandon`` after an error."""

    def begin(self) -> None: ...

    def tensor_file(self, name: str, specs: Mapping[str, Spec]) -> TensorFile: ...

    def finish(self, entries: Mapping[str, dict[str, Any]]) -> None: ...

    def abandon(self) -> None: ...


@dataclass
class SaveJob:
    """Files of named tensors and their target.

    Names and specs must be the same on every rank; the target is used on rank 0.
    """

    target: Target
    files: dict[str, dict[str, Part]] = field(default_factory=dict)

    def snapshot(self) -> SaveJob:
        files = {}
        for file, parts in self.files.items():
            files[file] = {name: part.snapshot() for name, part in parts.items()}
        return SaveJob(self.target, files)


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
        self._group = dist.new_group(backend=host_backend()) if self._world > 1 else None
        self._thread: threading.Thread | None = None
        self._failure: Failure | None = None

    def save(self, job: SaveJob, *, in_background: bool = False) -> None:
        """Write the job, or start to write it, after the previous one is complete."""
        self.wait()
        if not in_background:
            self._run(job)
            self._raise_failure()
            return

        self._thread = threading.Thread(
            target=self._run, args=(job.snapshot(),), name="checkpoint writer"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            ValueError, RuntimeError: what failed on rank 0.
        """
        self.join()
        self._raise_failure()

    def join(self) -> None:
        """Wait for a save in the background; its error is kept for ``wait``."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            failure.raise_("saving a checkpoint")

    def _run(self, job: SaveJob) -> None:
        """Rank 0 writes, the others send all of their parts, also after an error of the writer."""
        writing = _Writing(job.target) if _rank() == 0 else None
        for file, parts in job.files.items():
            specs = {name: part.spec for name, part in parts.items()}
            if writing is not None:
                writing.open(file, specs)

            for name in file_order(specs):
                self._transfer(name, parts[name], writing)

        outcome = [writing.conclude() if writing is not None else None]
        if self._world > 1:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        self._failure = outcome[0]

    def _transfer(self, name: str, part: Part, writing: _Writing | None) -> None:
        if writing is not None:
            writing.append(name, self._receive(part))
        elif part.sharded:
            dist.send(as_bytes(part.tensor.cpu()), dst=0, group=self._group)

    def _receive(self, part: Part) -> Iterator[Tensor]:
        """On rank 0: the bytes of the tensor, rank by rank."""
        own = as_bytes(part.tensor.cpu())
        yield own

        if part.sharded:
            for rank in range(1, self._world):
                received = torch.empty_like(own)
                dist.recv(received, src=rank, group=self._group)
                yield received


class _Writing:
    """Rank 0's side of a save. After an error nothing more is written, but all is received."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.error: Exception | None = None
        self.entries: dict[str, dict[str, Any]] = {}
        self._file: TensorFile | None = None
        self._name = ""
        self._attempt(target.begin)

    def open(self, name: str, specs: Mapping[str, Spec]) -> None:
        self._close()

        def start() -> None:
            self._name, self._file = name, self.target.tensor_file(name, specs)

        self._attempt(start)

    def append(self, name: str, chunks: Iterator[Tensor]) -> None:
        def write() -> None:
            assert self._file is not None
            self._file.append(name, chunks)

        self._attempt(write)
        # Receive what an error has left, since the other ranks send it.
        for _ in chunks:
            pass

    def conclude(self) -> Failure | None:
        """Finish; returns the failure for all ranks."""
        self._close()
        self._attempt(lambda: self.target.finish(self.entries))
        if self.error is None:
            return None

        with suppress(OSError):
            self.target.abandon()
        return Failure.of(self.error)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        if self.error is not None:
            file.abandon()
            return

        def close() -> None:
            self.entries[self._name] = file.close()

        self._attempt(close)

    def _attempt(self, action: Callable[[], None]) -> None:
        if self.error is None:
            try:
                action()
            except Exception as error:
                self.error = error
                logger.error("saving a checkpoint failed: %s", error)


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
            failure[0].raise_(self.task)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
