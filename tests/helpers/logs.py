"""What the package logs."""

from __future__ import annotations

import logging


def captured_lines() -> list[str]:
    """The lines that the package logs from now on, as they come."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    package = logging.getLogger("opensora_sp")
    package.handlers[:] = [handler]
    package.setLevel(logging.INFO)
    return lines
