"""What the package logs, and waiting for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


def told() -> list[str]:
    """What the package will have logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    package = logging.getLogger("opensora_sp")
    package.handlers[:] = [handler]
    package.setLevel(logging.INFO)
    return lines


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
