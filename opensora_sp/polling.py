"""Polling with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL = 0.05  # seconds


def wait_until(condition: Callable[[], bool], timeout: float, interval: float = INTERVAL) -> bool:
    """Poll until a condition holds, for ``timeout`` seconds at most; returns whether it does."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
