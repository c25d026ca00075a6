"""Communication of sequence parallelism: a counter of collectives, and their exposed time.

Listeners, such as timers and profilers, are entered around each communication. Without listeners
nothing is measured. With them the same is sent in the same order, and on CUDA no rank waits for
them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeAlias

import torch

from opensora_sp.common.graphs import is_backward_running

Key: TypeAlias = tuple[str, str]

_open: list[CommLedger] = []


class CommLedger:
    """A communication counter of collectives, and of the elements and bytes sent to other ranks.

    It counts while it is entered. ``calls``, ``elements`` and ``bytes`` are keyed by (kind, phase).
    Phases are "forward", "recompute" (forward run again under gradient checkpointing) and
    "backward". Kinds:

    * "switch": tokens between the layouts
    * "heads": queries, keys, values and outputs
    * "branch": the input and output of a spatial attention
    * "tokens": all tokens, gathered for an attention
    * "gather": the output
    * "check": the comparison of inputs (``InputCheck``)
    * "data": features of the clips that each rank has encoded
    * "clips": what ranks agree on about clips beforehand
    """

    def __init__(self) -> None:
        self.calls: Counter[Key] = Counter()
        self.elements: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()

    def __enter__(self) -> CommLedger:
        _open.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        # Not the last: counters may be left in any order.
        _open.remove(self)


def record(kind: str, *, backward: bool, elements: int, element_size: int) -> None:
    """Count one collective in every counter that is entered."""
    phase = "recompute" if is_backward_running() else "forward"
    key = kind, "backward" if backward else phase
    for counter in _open:
        counter.calls[key] += 1
        counter.elements[key] += elements
        counter.bytes[key] += elements * element_size


Listener: TypeAlias = Callable[[str, bool, torch.device], AbstractContextManager[object]]
"""``listener(kind, backward, device)`` is entered while this rank communicates. Kinds are as in
``CommLedger``, and "zero" for ZeRO's collectives."""

_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener for each communication while this is entered."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def communicating(kind: str, device: torch.device, *, backward: bool = False) -> Iterator[None]:
    """Around whatever makes this rank, or its CUDA stream, wait for other ranks."""
    with ExitStack() as stack:
        for listener in _listeners:
            stack.enter_context(listener(kind, backward, device))
        yield


class CommTimer:
    """Exposed communication time in seconds, measured while it is entered.

    On a CPU this is the time spent in collectives and in completing asynchronous ones. On CUDA it
    is the time that the compute stream waits for them, between two events, which only ``take``
    reads. Communication that overlaps with computation does not count. Waiting for a slower rank
    does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = 0.0
        self._recorded: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._entered = ExitStack()

    def __enter__(self) -> CommTimer:
        self._entered.enter_context(listening(self._measure))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def take(self) -> float:
        """Seconds since the last call. On CUDA waits until all communication is complete."""
        if self._recorded:
            # Elapsed times of events that have not completed raise.
            torch.cuda.synchronize(self.device)
        for before, after in self._recorded:
            self._seconds += before.elapsed_time(after) / 1000

        self._recorded = []
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @contextmanager
    def _measure(self, kind: str, backward: bool, device: torch.device) -> Iterator[None]:
        if device.type != self.device.type:
            # On the host, while a GPU keeps computing.
            yield
        elif device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._recorded.append((before, after))
        else:
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since
