"""Exit codes of this process instead of its end, for what the watchdog does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def recorded_exits() -> Iterator[list[int]]:
    """The codes of ``os._exit``, which does not end the process inside of the block."""
    codes: list[int] = []
    with mock.patch.object(os, "_exit", codes.append):
        yield codes
