"""Who wants to know when this rank is in communication: timers and profilers, entered around each wait.

Without watchers nothing is measured. With them the same is sent in the same order, and on CUDA no one waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType

import torch

Watcher = Callable[[str, bool, torch.device], AbstractContextManager[object]]
"""``watcher(kind, backward, device)``, entered while this rank waits; kinds are those of ``CommLedger``, and "zero"."""

_watchers: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let a watcher take part while this is entered."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def communicating(kind: str, device: torch.device, *, backward: bool = False) -> Iterator[None]:
    """Around whatever makes this rank, or its CUDA stream, wait for others."""
    with ExitStack() as stack:
        for watcher in _watchers:
            stack.enter_context(watcher(kind, backward, device))
        yield


class CommTimer:
    """Seconds in which this rank waited for others, while it is entered.

    On a CPU that is the time spent in collectives and in waiting for those under way. On CUDA it is the time in which
    the computing stream stood still for them, between two events, which ``take`` alone reads. What travels while this
    rank computes does not count. Waiting for a slower rank does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = 0.0
        self._under_way: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._entered = ExitStack()

    def __enter__(self) -> CommTimer:
        self._entered.enter_context(watching(self._watch))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._entered.close()

    def take(self) -> float:
        """Seconds since the last call. On CUDA waits for the last exchange to be over."""
        for before, after in self._under_way:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1000
        self._spare += self._under_way
        self._under_way = []
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @contextmanager
    def _watch(self, kind: str, backward: bool, device: torch.device) -> Iterator[None]:
        if device.type != self.device.type:  # on the host, beside a GPU that goes on computing
            yield
        elif device.type == "cuda":
            before, after = self._spare.pop() if self._spare else (_event(), _event())
            before.record()
            yield
            after.record()
            self._under_way.append((before, after))
        else:
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
