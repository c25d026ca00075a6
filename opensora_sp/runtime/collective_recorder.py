"""Records the collectives that this rank has called, so that the watchdog can name one that hangs.

On an asynchronous backend (NCCL) a collective returns to the host at once. A rank that waits for
one is in ``tolist()`` or in a stream's synchronization, and its stack does not show the collective.
So all calls are recorded, whoever makes them. torch has no hook for that, and a dispatch mode would
slow every operator down. ``torch.distributed``'s functions are therefore wrapped while a watchdog
runs, as attributes of their modules, where torch, ColossalAI and this package look them up. A
record has shapes and a line of source, never a tensor, and costs a few microseconds.

Not recorded: what C++ launches by itself (the reducer of DistributedDataParallel), isend and irecv.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch.distributed import distributed_c10d as c10d

from .rank_info import format_ranks

# In newer versions the first names call the second ones.
RENAMED = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}

# Each calls the backend once. All other collectives of torch.distributed call one of these.
COLLECTIVES = (
    *(new if hasattr(c10d, new) else old for old, new in RENAMED.items()),
    "all_gather",
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
    "scatter",
    "send",
)
# Code whose lines are not reported: of torch, of this folder, and of wrappers of deprecated
# functions, as some collectives of torch 2.14 are.
_SKIPPED = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    typing_extensions.__file__,
    warnings.__file__,
)
HISTORY = 2048  # newest collectives kept per group; a host runs ahead of its device by fewer


@dataclass(eq=False, slots=True)
class Collective:
    """The ``number``-th collective of a process group since the watchdog started, by all ``ranks``.

    ``peer`` is the other rank of ``send`` or ``recv``, which have no number of their own.
    ``description`` is for users, where torch's name of the group is a digest of its ranks.
    """

    operation: str
    tensors: list[str]
    group: str
    number: int
    ranks: tuple[int, ...]
    peer: int | None
    location: str
    # To the host: on an asynchronous backend it is only launched then.
    returned: bool = False
    description: str = ""

    def __str__(self) -> str:
        call = f"{self.operation}({', '.join(self.tensors)})"
        name = self.description or self.group
        group = f"process group {name} ({format_ranks(self.ranks)})"
        return f"{call}, number {self.number} of {group}, called at {self.location}"


@dataclass
class _Group:
    ranks: tuple[int, ...]
    called: int = 0
    returned: int = 0
    newest: deque[Collective] = field(default_factory=lambda: deque(maxlen=HISTORY))


class CollectiveRecorder:
    """Records collectives from ``start`` to ``stop``. All ranks start at the same collective.

    Args:
        timeout: of the backends of process groups that are made meanwhile without a timeout.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._open: set[Collective] = set()
        self._replaced: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        for name in COLLECTIVES:
            self._replace(name, self._recorded(getattr(c10d, name)))
        self._replace("new_group", self._with_timeout(c10d.new_group))

    def stop(self) -> None:
        for module, name, function in reversed(self._replaced):
            setattr(module, name, function)
        self._replaced.clear()

    def counts(self) -> dict[str, dict[str, int]]:
        """By group, how many collectives this rank has called, and how many have returned."""
        with self._lock:
            return {
                "called": {name: group.called for name, group in self._groups.items()},
                "returned": {name: group.returned for name, group in self._groups.items()},
            }

    def peers(self) -> list[int]:
        """The ranks that this one sends to or receives from at the moment."""
        with self._lock:
            return sorted({call.peer for call in self._open if call.peer is not None})

    def pending(self) -> list[Collective]:
        """Collectives that may be pending: calls of some thread, and the newest of each group."""
        with self._lock:
            newest = [group.newest[-1] for group in self._groups.values() if group.newest]
            # Another thread, such as a save in the background, may wait in an earlier one.
            others = [call for call in self._open if call not in newest]
        return [*others, *newest]

    def find(self, group: str, number: int) -> Collective | None:
        """A group's collective of this number, unless it is too old."""
        with self._lock:
            newest = self._groups[group].newest
            return next((call for call in newest if call.number == number), None)

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        replaced = getattr(c10d, name)
        for module in (c10d, dist):
            # Somebody else may have replaced it, and is left alone.
            if getattr(module, name) is replaced:
                self._replaced.append((module, name, replaced))
                setattr(module, name, function)

    def _with_timeout(self, new_group: Callable[..., Any]) -> Callable[..., Any]:
        """``new_group`` has other defaults (NCCL 10 minutes, gloo 30), whatever WORLD has."""

        @functools.wraps(new_group)
        def with_timeout(ranks: Any = None, timeout: Any = None, *args: Any, **options: Any) -> Any:
            return new_group(ranks, timeout or self._timeout, *args, **options)

        return with_timeout

    def _recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def recorded(*args: Any, **options: Any) -> Any:
            call = self._record_call(function.__name__, dict(zip(names, args), **options))
            try:
                return function(*args, **options)
            finally:
                self._record_return(call)

        return recorded

    def _record_call(self, operation: str, arguments: dict[str, Any]) -> Collective | None:
        group: Any = arguments.get("group") or dist.group.WORLD
        name = c10d._world.pg_names.get(group)
        if name is None:
            # This rank is no member of the group.
            return None

        peer = None
        if operation in ("send", "recv"):
            peer = arguments.get("dst" if operation == "send" else "src")
            if peer is None:
                # From any rank: none can be named.
                return None

        tensors, line = _tensor_arguments(arguments), location(sys._getframe())
        with self._lock:
            state = self._groups.get(name)
            if state is None:
                state = self._groups[name] = _Group(tuple(dist.get_process_group_ranks(group)))

            # Only two ranks call send and recv, which would set the numbers of a group's ranks
            # apart.
            state.called += peer is None
            ranks = state.ranks if peer is None else (dist.get_rank(), peer)
            call = Collective(operation, tensors, name, state.called, ranks, peer, line)
            call.description = _description(group)
            if peer is None:
                state.newest.append(call)
            self._open.add(call)
        return call

    def _record_return(self, call: Collective | None) -> None:
        if call is None:
            return
        with self._lock:
            call.returned = True
            self._open.remove(call)
            if call.peer is None:
                self._groups[call.group].returned += 1


def _description(group: Any) -> str:
    """Description of a group; empty for torch's own descriptions."""
    description = str(getattr(group, "group_desc", ""))
    return "" if description in ("undefined", "default_pg") else description


def _tensor_arguments(arguments: dict[str, Any]) -> list[str]:
    """Shapes and dtypes of tensors, and of lists of tensors of one shape."""
    tensors = []
    for name, argument in arguments.items():
        is_list = isinstance(argument, (list, tuple)) and len(argument) > 0
        tensor = argument[0] if is_list else argument
        if isinstance(tensor, torch.Tensor):
            several = f"{len(argument)} x " if is_list else ""
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors.append(f"{name} {several}{list(tensor.shape)} {dtype}")
    return tensors


def location_of_thread(thread: int) -> str:
    """The line of a thread, as in ``location``."""
    frame = sys._current_frames().get(thread)
    return "an unknown place" if frame is None else location(frame)


def stack_of_thread(thread: int) -> str:
    """The whole stack of a thread, outermost frame first."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame))


def location(frame: FrameType) -> str:
    """``folder/file.py:line (function)`` of the innermost frame outside torch and this folder."""
    while frame.f_code.co_filename.startswith(_SKIPPED) and frame.f_back is not None:
        frame = frame.f_back
    file = "/".join(frame.f_code.co_filename.rsplit("/", 3)[-3:])
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
