"""Communication time: listeners, such as timers and profilers, that are entered around each
communication.

Without listeners nothing is measured. With them the same is sent in the same order, and on CUDA no
rank waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeAlias

import torch

Listener: TypeAlias = Callable[[str, bool, torch.device], AbstractContextManager[object]]
"""``listener(kind, backward, device)`` is entered while this rank communicates. Kinds are those of
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
        self._recorded: list[_Events] = []
        self._spare: list[_Events] = []
        self._entered = ExitStack()

    def __enter__(self) -> CommTimer:
        self._entered.enter_context(listening(self._measure))
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def take(self) -> float:
        """Seconds since the last call. On CUDA waits until all communication is complete."""
        if self._recorded:
            torch.cuda.synchronize(self.device)
        for events in self._recorded:
            self._seconds += events.before.elapsed_time(events.after) / 1000

        self._spare += self._recorded
        self._recorded = []
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @contextmanager
    def _measure(self, kind: str, backward: bool, device: torch.device) -> Iterator[None]:
        if device.type != self.device.type:
            # On the host, beside a GPU that keeps computing.
            yield
        elif device.type == "cuda":
            events = self._spare.pop() if self._spare else _Events()
            events.before.record()
            yield
            events.after.record()
            self._recorded.append(events)
        else:
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since


class _Events:
    """A pair of CUDA events around one communication."""

    def __init__(self) -> None:
        self.before = torch.cuda.Event(enable_timing=True)
        self.after = torch.cuda.Event(enable_timing=True)
