"""Find accesses of GPU memory that CUDA streams do not order.

There is a vector clock per stream and one for the host.

Every operator that torch dispatches is taken as a kernel on the current stream, which reads and
writes whole storages. Order comes from events, synchronizations and ``record_stream``, reported by
torch's trace of its CUDA calls and by the operators. Two accesses of which one writes, and which
nothing orders, are a race whatever the kernels' speed.

Memory that is freed counts as reused at once: the next operator that runs on the stream for which
it was allocated may write to it. So a race does not depend on which block the allocator picks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from cuda_stub.collectives import RecordingGroup
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = str(Path(torch.__file__).parent)
AUTOGRAD = "autograd"

Clock = dict[int, int]  # per stream: how many of its operators are known to have finished


def join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


@dataclass
class Access:
    stream: int
    count: int  # the operator's number on its stream
    name: str

    def before(self, clock: Clock) -> bool:
        return self.count <= clock.get(self.stream, 0)


@dataclass
class Memory:
    """A block that torch's allocator handed out."""

    pool: int  # the stream for which it was allocated
    write: Access
    reads: dict[int, Access] = field(default_factory=dict)  # per stream the last since the write
    recorded: set[int] = field(default_factory=set)

    def accesses(self) -> Iterator[Access]:
        yield self.write
        yield from self.reads.values()


class StreamChecker(TorchDispatchMode):
    """``with StreamChecker() as checker: ...``; ``checker.races`` then lists what was not ordered.

    One to a process: torch keeps the callbacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.operators: dict[int, int] = {}  # per stream
        self._host: Clock = {}
        self._streams: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._memory: dict[int, Memory] = {}
        self._freed: dict[int, list[Memory]] = {}  # per pool
        self._listen()
        RecordingGroup.has_kernels = True

    def _listen(self) -> None:
        torch._C._activate_gpu_trace()
        _gpu_trace.register_callback_for_event_record(self._event_recorded)
        _gpu_trace.register_callback_for_event_wait(self._event_awaited)
        _gpu_trace.register_callback_for_memory_allocation(self._allocated)
        _gpu_trace.register_callback_for_memory_deallocation(self._deallocated)
        _gpu_trace.register_callback_for_device_synchronization(self._device_synchronized)
        _gpu_trace.register_callback_for_stream_synchronization(self._stream_synchronized)
        _gpu_trace.register_callback_for_event_synchronization(self._event_synchronized)

    # What orders operators

    def _clock(self, stream: int) -> Clock:
        """What has finished when the next operator of a stream starts."""
        clock = self._streams.setdefault(stream, {})
        join(clock, self._host)
        return clock

    def _event_recorded(self, event: int, stream: int) -> None:
        self._events[event] = dict(self._clock(stream))

    def _event_awaited(self, event: int, stream: int) -> None:
        join(self._clock(stream), self._events.get(event, {}))

    def _device_synchronized(self) -> None:
        for clock in self._streams.values():
            join(self._host, clock)

    def _stream_synchronized(self, stream: int) -> None:
        join(self._host, self._clock(stream))

    def _event_synchronized(self, event: int) -> None:
        join(self._host, self._events.get(event, {}))

    # What is accessed

    def _allocated(self, pointer: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        # Whoever uses the block on another stream has to wait for what used it before on this one.
        count = self._clock(stream).get(stream, 0)
        self._memory[pointer] = Memory(stream, Access(stream, count, "the allocation"))

    def _deallocated(self, pointer: int) -> None:
        memory = self._memory.pop(pointer, None)
        if memory is not None:
            self._freed.setdefault(memory.pool, []).append(memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads, writes = _arguments(func._schema, args, kwargs)
        result = func(*args, **kwargs)
        if func is torch.ops.aten.record_stream.default:
            self._memory[_pointer(args[0])].recorded.add(_handle(args[1]))
            return result

        if any(_is_view(returned) for returned in func._schema.returns):
            reads = set()  # of addresses only
        elif not writes:
            tensors = (t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
            writes = {_pointer(t) for t in tensors if t.is_cuda} - reads

        self._run(func.__name__, reads - {0}, writes - {0})
        if func is torch.ops.aten._local_scalar_dense.default and reads:
            self._stream_synchronized(torch.cuda.current_stream().cuda_stream)
        return result

    def _run(self, name: str, reads: set[int], writes: set[int]) -> None:
        reads, writes = reads & self._memory.keys(), writes & self._memory.keys()
        if not reads and not writes:
            return
        stream = torch.cuda.current_stream().cuda_stream
        clock = self._clock(stream)
        clock[stream] = self.operators[stream] = self.operators.get(stream, 0) + 1
        caller = _caller()
        access = Access(stream, clock[stream], f"{name} at {caller} on stream {stream:#x}")
        self._reuse_freed(stream, clock, access)

        for pointer in reads | writes:
            memory = self._memory[pointer]
            earlier = memory.accesses() if pointer in writes else [memory.write]
            for one in earlier:
                if not one.before(clock):
                    self.races.append(f"{access.name} does not wait for {one.name}")
        for pointer in reads:
            self._memory[pointer].reads[stream] = access
            if caller == AUTOGRAD:
                # What the engine hands to another stream, it records there, past the dispatcher.
                self._memory[pointer].recorded.add(stream)
        for pointer in writes:
            self._memory[pointer].write, self._memory[pointer].reads = access, {}

    def _reuse_freed(self, stream: int, clock: Clock, access: Access) -> None:
        for memory in self._freed.pop(stream, []):
            for one in memory.accesses():
                # The allocator itself waits for the streams that were recorded.
                if not one.before(clock) and one.stream not in memory.recorded:
                    self.races.append(f"{access.name} may reuse freed memory before {one.name}")


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.is_cuda else 0


def _handle(stream: torch.Stream) -> int:
    of_cuda = torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return of_cuda.cuda_stream


def _is_view(returned: Any) -> bool:
    return returned.alias_info is not None and not returned.alias_info.is_write


def _arguments(schema: Any, args: Any, kwargs: Any) -> tuple[set[int], set[int]]:
    """The storages that an operator reads and those that it writes to, of its arguments."""
    reads: set[int] = set()
    writes: set[int] = set()
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                (writes if written else reads).add(_pointer(leaf))
    return reads, writes


def _caller() -> str:
    """The innermost line outside of torch and of this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, __file__)):
        frame = frame.f_back
    # In a thread of autograd, Python appears in hooks only.
    return AUTOGRAD if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
