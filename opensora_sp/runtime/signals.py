"""SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) as requests to stop; a second Ctrl-C ends the process.

SIGUSR1 is what SLURM is often asked to send before the end of a job's time. While these signals are
handled, the exit of a launcher is a request to stop as well, which the watchdog makes. The kernel
does not kill the process then (see ``launchers``), but lets it continue if it was
stopped.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from typing import Any

from opensora_sp.common.console import INTERRUPTED

from .processes import is_request_to_stop, set_parent_death_signal

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A terminal and a launcher that forwards SIGINT send it twice, within so many seconds.
SAME_INTERRUPT = 1.0


class SignalHandler:
    """Handles these signals from ``install`` to ``uninstall``, in the main thread only.

    Attributes:
        received: name of the signal received, empty before; SIGINT prevails.
    """

    def __init__(self) -> None:
        self.received = ""
        self._interrupted_at = math.inf
        self._previous: dict[int, Any] = {}
        self._parent_death_signal = 0

    def install(self) -> None:
        """Replace the handlers, except of a signal that is ignored, and a script's of SIGUSR1."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in REQUESTS:
            if not _is_kept(number):
                self._previous[number] = signal.signal(number, self._handle) or signal.SIG_DFL
        self._parent_death_signal = set_parent_death_signal(signal.SIGCONT)
        is_request_to_stop.set()

    def uninstall(self) -> None:
        is_request_to_stop.clear()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        set_parent_death_signal(self._parent_death_signal)

    def _handle(self, number: int, frame: Any) -> None:
        # After SIGINT, torchrun forwards a second Ctrl-C as SIGTERM.
        now = time.monotonic()
        is_second = now - self._interrupted_at >= SAME_INTERRUPT
        if is_second and number != signal.SIGUSR1:
            os._exit(INTERRUPTED)
        if number == signal.SIGINT:
            self._interrupted_at = min(self._interrupted_at, now)

        # The watchdog's thread logs it: this thread may hold the lock of a log handler.
        if self.received != "SIGINT":
            self.received = signal.Signals(number).name


def _is_kept(number: int) -> bool:
    handler = signal.getsignal(number)
    has_own_meaning = number == signal.SIGUSR1 and handler is not signal.SIG_DFL
    return has_own_meaning or handler is signal.SIG_IGN
