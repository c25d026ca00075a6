"""One rank of any world, without the others: process groups that check and record each collective.

    join(world=8, rank=3)    # instead of init_process_group
    ...
    recording.collectives    # of what ran after it

There is a backend for tensors on the device, with the rules of NCCL, and one for tensors on the
host. A tensor in the wrong one, or one that is not contiguous, raises `CollectiveError`. The other
ranks are taken to hold what this one holds: what a host group returns is right for such a world,
and so is what a device group gathers or broadcasts. What a device group reduces was computed and
has no value: a few numbers, by which runs decide what to do next, become zero, others stay as they
are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_stub.inside import Session

DEVICE, HOST = "recording_device", "recording_host"
MAX_COPY = 1 << 20  # bytes of a tensor on the device whose content is moved
MAX_ZEROED = 1 << 10  # bytes of a tensor on the device whose sum over the ranks is zero


@dataclass(frozen=True)
class Collective:
    name: str
    group: str  # "device" or "host"
    ranks: tuple[int, ...]  # of the world
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that are sent
    dtypes: tuple[str, ...]
    bytes: int
    stream: int  # the current stream
    phase: str
    where: str


class CollectiveError(AssertionError):
    """A tensor that NCCL or gloo would refuse."""


class Done(dist.Work):
    """Work in flight on the group's stream, as NCCL's: the current stream waits for it."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        super().__init__()
        self.event = event

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class RecordingGroup(dist.ProcessGroup):
    """A process group of this rank alone. Its methods are those that `torch.distributed` calls."""

    # True where a collective is an operator on the group's stream, for a `StreamChecker` to see.
    has_kernels = False

    def __init__(self, rank: int, size: int, ranks: Iterable[int], device: str) -> None:
        super().__init__(rank, size)
        self.ranks = tuple(ranks) or tuple(range(size))
        self.device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None

    @property
    def _device_types(self) -> list[torch.device]:
        return [self.device]

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def pg_name(self) -> str:
        return self.group_name

    def getBackendName(self) -> str:  # noqa: N802
        return HOST if self.device.type == "cpu" else DEVICE

    # Checks, the record, and streams as NCCL uses them.

    def _begin(self, name: str, sent: list[Tensor], received: list[Tensor]) -> Done:
        session = Session.current
        where = session.source_line() if session else ""
        for tensor in (*sent, *received):
            self._check(name, tensor, where)

        if session:
            session.collectives.append(
                Collective(
                    name=name,
                    group="host" if self.device.type == "cpu" else "device",
                    ranks=self.ranks,
                    shapes=tuple(tuple(tensor.shape) for tensor in sent),
                    dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in sent),
                    bytes=sum(tensor.nbytes for tensor in sent),
                    stream=session.stream(),
                    phase=session.phase,
                    where=where,
                )
            )
        return Done(self._run_on_own_stream(sent, received))

    def _check(self, name: str, tensor: Tensor, where: str) -> None:
        about = f"{name} of {tuple(tensor.shape)} {tensor.dtype} at {where}"
        if tensor.device.type != self.device.type:
            raise CollectiveError(
                f"{about}: got a tensor on {tensor.device.type} in a group for {self.device.type}"
            )
        if not tensor.is_contiguous():
            raise CollectiveError(
                f"{about}: got strides {tensor.stride()}, expected contiguous ones"
            )

    def _run_on_own_stream(
        self, sent: list[Tensor], received: list[Tensor]
    ) -> torch.cuda.Event | None:
        if self.device.type == "cpu":
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()

        self._stream.wait_stream(torch.cuda.current_stream())
        for tensor in (*sent, *received):
            tensor.record_stream(self._stream)
        if self.has_kernels:
            with torch.cuda.stream(self._stream):
                for output in received or sent:
                    output.view(-1)[:1].add_(sent[0].view(-1)[:1])
        return self._stream.record_event()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self.device.type == "cpu":
            target.copy_(source.view_as(target))
        elif source.nbytes <= MAX_COPY:
            # Memory of the stub's device is the host's; not a copy that the record should show.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    # Collectives.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Done:
        work = self._begin("all_reduce", tensors, [])
        for tensor in tensors:
            self._reduce(tensor, opts)
        return work

    def _reduce(self, tensor: Tensor, opts: Any) -> None:
        if self.device.type != "cpu":
            if tensor.nbytes <= MAX_ZEROED:
                ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
        elif opts is not None and opts.reduceOp == dist.ReduceOp.SUM:
            tensor.mul_(self.size())

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Done:
        return self._begin("broadcast", tensors, [])

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Done:
        received = list(chain.from_iterable(outputs))
        work = self._begin("all_gather", inputs, received)
        for tensors, own in zip(outputs, inputs, strict=True):
            for tensor in tensors:
                self._copy(tensor, own)
        return work

    # Older versions of torch call collectives of one tensor by other names: both are here.

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Done:
        work = self._begin("all_gather_into_tensor", [own], [output])
        for chunk in output.view(self.size(), -1):
            self._copy(chunk, own.view(-1))
        return work

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Done:
        work = self._begin("reduce_scatter_tensor", [whole], [output])
        self._copy(output.view(-1), whole.view(self.size(), -1)[self.rank()])
        self._reduce(output, opts)
        return work

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, own: Tensor, receive: list[int], send: list[int], opts: Any = None
    ) -> Done:
        work = self._begin("all_to_all_single", [own], [output])
        for tensor, splits in ((own, send), (output, receive)):
            if splits and (len(splits) != self.size() or sum(splits) != len(tensor)):
                raise CollectiveError(f"got splits {splits} of {tuple(tensor.shape)}")

        # Of what the others send only the size is known.
        kept, arrived = self._part(own, send), self._part(output, receive)
        if kept.shape == arrived.shape:
            self._copy(arrived, kept)
        return work

    alltoall_base = all_to_all_single

    def _part(self, tensor: Tensor, splits: list[int]) -> Tensor:
        rank, size = self.rank(), self.size()
        return (tensor.split(splits) if splits else tensor.chunk(size))[rank]

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Done:
        return self._begin("send", tensors, [])

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Done:
        work = self._begin("recv", [], tensors)
        if self.device.type == "cpu":
            # Only the size of what arrives is known.
            for tensor in tensors:
                tensor.zero_()
        return work

    def barrier(self, opts: Any = None) -> Done:
        return self._begin("barrier", [], [])


def _create(device: str) -> Any:
    def create(options: Any, _: Any) -> RecordingGroup:
        ranks = options.global_ranks_in_group
        return RecordingGroup(options.group_rank, options.group_size, ranks, device)

    return create


def join(*, world: int = 1, rank: int = 0) -> None:
    """Become one rank of a world. Groups of CPU tensors get the host's backend (`host_backend`)."""
    # The flight recorder of torch 2.15 asks for names of groups, which these have not set.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    for name, device in ((DEVICE, "cuda"), (HOST, "cpu")):
        dist.Backend.register_backend(name, _create(device), extended_api=True, devices=[device])
    dist.init_process_group(
        f"cuda:{DEVICE},cpu:{HOST}", store=dist.HashStore(), rank=rank, world_size=world
    )
