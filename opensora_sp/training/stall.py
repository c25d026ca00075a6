"""A stalled run: one in which no step has ended for much longer than before."""

from __future__ import annotations

import threading
from collections.abc import Callable

INTERVAL = 5.0  # seconds between two looks
SHORTEST = 600.0  # seconds without a step that are no stall in any run
FACTOR = 3.0  # times the longest wait between two steps of the run so far


class StallMonitor:
    """A thread that reports a stall once, until the next step ends.

    Validation and checkpoints lie between two steps, and so are part of the longest wait. A run
    that hangs is ended by the watchdog, which may wait longer (``collective_timeout``).

    Args:
        on_stall: called with the seconds since the last step, from the thread.
    """

    def __init__(self, on_stall: Callable[[float], None]) -> None:
        self._on_stall = on_stall
        # Counted, so that time in which the process is suspended is none.
        self._waited, self._longest = 0.0, 0.0
        self._is_reported = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall monitor", daemon=True)
        self._thread.start()

    def step(self) -> None:
        """A step has ended."""
        self._longest = max(self._longest, self._waited)
        self._waited, self._is_reported = 0.0, False

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL):
            self._waited += INTERVAL
            limit = max(SHORTEST, FACTOR * self._longest)
            if self._waited > limit and not self._is_reported:
                self._is_reported = True
                self._on_stall(self._waited)
