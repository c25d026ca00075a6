"""Tensors that ranks hold in parts, written as whole ones by rank 0, at once or behind the training's back.

Each rank keeps its own part of a tensor and rank 0 asks for one part after the other, so beyond what the training
holds rank 0 needs one part of one tensor, and an asynchronous save one copy of each rank's own parts.
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

from opensora_sp.backends import host_backend

from .tensor_file import Spec, TensorFile, as_bytes, file_order

logger = logging.getLogger(__name__)
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Part:
    """What this rank gives to a tensor of a checkpoint.

    ``sharded``: ``tensor`` is this rank's run of the flattened tensor, all ranks' runs are equally long, and what the
    last ones have too much is padding. Otherwise the tensor is whole, the same on every rank, and rank 0's is taken.
    ``constant``: it does not change while the training goes on.
    """

    tensor: Tensor
    spec: Spec
    sharded: bool = False
    constant: bool = False

    @classmethod
    def whole(cls, tensor: Tensor, *, constant: bool = False) -> Part:
        return cls(tensor, Spec.of(tensor), constant=constant)

    def snapshot(self) -> Part:
        """The same with a copy on the CPU, where one is needed."""
        if self.constant or not (self.sharded or _rank() == 0):
            return self
        return replace(self, tensor=self.tensor.detach().to("cpu", copy=True))


class Target(Protocol):
    """Where rank 0 writes: begun once, then file by file, then finished; or abandoned after an error."""

    def begin(self) -> None: ...

    def tensor_file(self, name: str, specs: Mapping[str, Spec]) -> TensorFile: ...

    def finish(self, entries: Mapping[str, dict[str, Any]]) -> None: ...

    def abandon(self) -> None: ...


@dataclass
class SaveJob:
    """Files of named tensors, the same on every rank but for the parts, and the target, used on rank 0."""

    target: Target
    files: dict[str, dict[str, Part]] = field(default_factory=dict)

    def snapshot(self) -> SaveJob:
        files = {
            f: {name: part.snapshot() for name, part in parts.items()}
            for f, parts in self.files.items()
        }
        return SaveJob(self.target, files)


class Saver:
    """Saves one job after the other. Creating and every method is collective.

    An error of the writer is raised on every rank: by ``save``, or of an asynchronous save by the next ``save`` or
    ``wait``. A process group of its own (gloo) carries the parts, so that a save under way and the training's
    collectives do not meet. Without a process group there is one process.
    """

    def __init__(self) -> None:
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._group = dist.new_group(backend=host_backend()) if self._world > 1 else None
        self._thread: threading.Thread | None = None
        self._error: tuple[bool, str] | None = None

    def save(self, job: SaveJob, *, in_background: bool = False) -> None:
        """Write the job, or start to; one that is still under way is waited for."""
        self.wait()
        if not in_background:
            self._run(job)
            return self._tell()
        self._thread = threading.Thread(
            target=self._run, args=(job.snapshot(),), name="checkpoint writer"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way.

        Raises:
            ValueError, RuntimeError: what failed on rank 0.
        """
        self.join()
        self._tell()

    def join(self) -> None:
        """Until nothing is under way; what went wrong is kept for ``wait``."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _tell(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise_told(error, "saving a checkpoint")

    def _run(self, job: SaveJob) -> None:
        """Rank 0 writes; the others send their parts. Whatever happens to the writer, all parts are taken."""
        written = _Writing(job.target) if _rank() == 0 else None
        for name, parts in job.files.items():
            specs = {tensor: part.spec for tensor, part in parts.items()}
            if written is not None:
                written.open(name, specs)
            for tensor in file_order(specs):
                self._pass(tensor, parts[tensor], written)
        told: list[Any] = [written.conclude() if written is not None else None]
        if self._world > 1:
            dist.broadcast_object_list(told, src=0, group=self._group)
        self._error = told[0]

    def _pass(self, name: str, part: Part, written: _Writing | None) -> None:
        if written is not None:
            written.append(name, self._runs(part))
        elif part.sharded:
            dist.send(as_bytes(part.tensor.cpu()), dst=0, group=self._group)

    def _runs(self, part: Part) -> Iterator[Tensor]:
        """On rank 0: the runs of the tensor's bytes, rank by rank."""
        own = as_bytes(part.tensor.cpu())
        yield own
        if part.sharded:
            for rank in range(1, self._world):
                received = torch.empty_like(own)
                dist.recv(received, src=rank, group=self._group)
                yield received


class _Writing:
    """Rank 0's side: after the first error nothing is written any more, but everything is still received."""

    def __init__(self, target: Target) -> None:
        self.target, self.error = target, None
        self.entries: dict[str, dict[str, Any]] = {}
        self._file: TensorFile | None = None
        self._name = ""
        self._attempt(target.begin)

    error: BaseException | None

    def open(self, name: str, specs: Mapping[str, Spec]) -> None:
        self._close()

        def start() -> None:
            self._name, self._file = name, self.target.tensor_file(name, specs)

        self._attempt(start)

    def append(self, name: str, runs: Iterator[Tensor]) -> None:
        def write() -> None:
            assert self._file is not None
            self._file.append(name, runs)

        self._attempt(write)
        for _ in runs:  # what an error has left
            pass

    def conclude(self) -> tuple[bool, str] | None:
        """Finish; returns what went wrong, to be told to all ranks."""
        self._close()
        self._attempt(lambda: self.target.finish(self.entries))
        if self.error is None:
            return None
        with suppress(OSError):
            self.target.abandon()
        return described(self.error)

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
    """``with on_rank_0(what) as here:`` runs rank 0's part; its error is raised on every rank, so that none hangs."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> bool:
        return _rank() == 0

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if not dist.is_initialized():
            return
        told: list[Any] = [None if error is None else described(error)]
        dist.broadcast_object_list(told, src=0)
        if told[0] is not None and error is None:
            raise_told(told[0], self.what)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def described(error: BaseException) -> tuple[bool, str]:
    """Whether an error is the user's, and its text: what the other ranks are told."""
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        return True, (
            f"got '{error.strerror}' while writing {error.filename}; expected room and leave to write there; make room "
            "(keep_last=N keeps fewer checkpoints) or choose another disk, then go on from the newest checkpoint"
        )
    return isinstance(error, ValueError), f"{error}"


def raise_told(told: tuple[bool, str], what: str) -> None:
    is_users, text = told
    raise ValueError(text) if is_users else RuntimeError(f"rank 0 failed {what}: {text}")
