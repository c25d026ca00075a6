"""Waiting for a condition with a deadline, instead of sleeping for a time that should be enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(
    condition: Callable[[], Any],
    seconds: float = 30.0,
    failure: Callable[[], str] = lambda: "timed out",
) -> Any:
    """The first true value of a condition; after ``seconds`` an error with ``failure()``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, failure()
        time.sleep(0.05)
    return value
