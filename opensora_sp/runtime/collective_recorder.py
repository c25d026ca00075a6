"""The collectives that this rank has begun: the newest of each process group, and those it is in.

On an asynchronous backend (NCCL) a collective returns to the host at once, and a rank that waits
for one stands in ``tolist()`` or in a stream's synchronization: no stack shows what it waits for.
So calls are recorded, whoever makes them. torch has no hook for that, and a dispatch mode would
slow every operator down; ``torch.distributed``'s functions are therefore wrapped while a watchdog
runs, as attributes of their modules, where torch, ColossalAI and this package look them up. A
record has shapes and a line of source, never a tensor, and costs a few microseconds.

Not recorded: what C++ launches by itself (the reducer of DistributedDataParallel), isend and irecv.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .stack_inspection import is_outside, place_of

# Each is one collective of the backend; what is left out of torch's functions calls one of these.
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",  # of newer versions, as is reduce_scatter_single
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
KEPT = 2048  # newest collectives of a group; a host runs ahead of its device by fewer


@dataclass(eq=False, slots=True)
class Collective:
    """The ``number``-th collective of a process group since the watchdog began, by all ``ranks``.

    ``peer`` is the other rank of ``send`` or ``recv``, which have no number of their own.
    """

    operation: str
    tensors: tuple[tuple[str, int, torch.Size, torch.dtype], ...]
    group: str
    number: int
    ranks: tuple[int, ...]
    peer: int | None
    place: str
    returned: bool = False  # to the host; on an asynchronous backend that means launched

    def __str__(self) -> str:
        tensors = ", ".join(_shape(*tensor) for tensor in self.tensors)
        which = f"number {self.number} of process group {self.group} (ranks {_ranks(self.ranks)})"
        return f"{self.operation}({tensors}), {which}, at {self.place}"


@dataclass
class _Group:
    ranks: tuple[int, ...]
    begun: int = 0
    returned: int = 0
    newest: deque[Collective] = field(default_factory=lambda: deque(maxlen=KEPT))


class CollectiveRecorder:
    """Records collectives from ``start`` to ``stop``. All ranks start at the same place.

    Args:
        timeout: of the backends of process groups that are made meanwhile, where none is given.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._open: dict[int, Collective] = {}
        self._replaced: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        for name in COLLECTIVES:
            if hasattr(c10d, name):
                self._replace(name, self._recorded(getattr(c10d, name)))
        self._replace("new_group", self._with_timeout(c10d.new_group))

    def stop(self) -> None:
        for module, name, function in reversed(self._replaced):
            setattr(module, name, function)
        self._replaced.clear()

    def counts(self) -> dict[str, dict[str, int]]:
        """By group, how many collectives this rank has begun and how many have returned."""
        with self._lock:
            return {
                "begun": {name: group.begun for name, group in self._groups.items()},
                "returned": {name: group.returned for name, group in self._groups.items()},
            }

    def pending(self) -> list[Collective]:
        """What may be outstanding: calls that some thread is in, and the newest of each group."""
        with self._lock:
            newest = [group.newest[-1] for group in self._groups.values() if group.newest]
            others = [call for call in self._open.values() if call not in newest]
        return [*others, *newest]

    def find(self, group: str, number: int) -> Collective | None:
        """A group's collective of this number, unless it is too old."""
        with self._lock:
            newest = self._groups[group].newest
            index = number - newest[0].number if newest else -1
            return newest[index] if 0 <= index < len(newest) else None

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        former = getattr(c10d, name)
        for module in (c10d, dist):
            if getattr(module, name) is former:
                self._replaced.append((module, name, former))
                setattr(module, name, function)

    def _with_timeout(self, new_group: Callable[..., Any]) -> Callable[..., Any]:
        """``new_group`` has defaults of its own (NCCL 10 minutes, gloo 30), whatever WORLD has."""

        @functools.wraps(new_group)
        def with_timeout(ranks: Any = None, timeout: Any = None, *args: Any, **options: Any) -> Any:
            return new_group(ranks, timeout or self._timeout, *args, **options)

        return with_timeout

    def _recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def recorded(*args: Any, **options: Any) -> Any:
            call = self._begin(function.__name__, dict(zip(names, args), **options))
            try:
                return function(*args, **options)
            finally:
                self._end(call)

        return recorded

    def _begin(self, operation: str, values: dict[str, Any]) -> Collective | None:
        group: Any = values.get("group") or dist.group.WORLD
        name = c10d._world.pg_names.get(group)
        if name is None:  # not a member
            return None

        is_for_one = operation in ("send", "recv")
        peer = values.get("dst" if operation == "send" else "src") if is_for_one else None
        if is_for_one and peer is None:  # from any rank, so none can be named
            return None
        tensors, place = _tensors(values), place_of(_caller())

        with self._lock:
            own = self._groups.get(name)
            if own is None:
                own = self._groups[name] = _Group(tuple(dist.get_process_group_ranks(group)))

            if peer is not None:
                ranks = (dist.get_rank(), peer)
                call = Collective(operation, tensors, name, own.begun, ranks, peer, place)
            else:
                own.begun += 1
                call = Collective(operation, tensors, name, own.begun, own.ranks, None, place)
                own.newest.append(call)
            self._open[id(call)] = call
        return call

    def _end(self, call: Collective | None) -> None:
        if call is None:
            return
        with self._lock:
            call.returned = True
            del self._open[id(call)]
            if call.peer is None:
                self._groups[call.group].returned += 1


def _tensors(values: dict[str, Any]) -> tuple[tuple[str, int, torch.Size, torch.dtype], ...]:
    """Name, count (0: no list), shape and dtype of the arguments that are tensors or lists of them."""
    found = []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            found.append((name, 0, value.shape, value.dtype))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            found.append((name, len(value), value[0].shape, value[0].dtype))
    return tuple(found)


def _shape(name: str, count: int, shape: torch.Size, dtype: torch.dtype) -> str:
    several = f"{count} x " if count else ""
    return f"{name} {several}{list(shape)} {str(dtype).removeprefix('torch.')}"


def _ranks(ranks: Sequence[int]) -> str:
    """``0, 1, 2``; long runs as ``0 to 63``."""
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _caller() -> Any:
    """The innermost frame outside of torch and of the watchdog."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_outside(frame):
        frame = frame.f_back
    return frame
