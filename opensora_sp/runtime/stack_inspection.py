"""Where a thread of this process stands: the line outside of torch that it is in."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_PASSED_OVER = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def stands_at(thread: int) -> str:
    """File, line and function that a thread is in, outside of torch and of the watchdog."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not is_outside(frame):
        frame = frame.f_back
    return "an unknown place" if frame is None else place_of(frame)


def is_outside(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_PASSED_OVER)


def place_of(frame: FrameType) -> str:
    """``folder/file.py:line (function)``."""
    file = "/".join(frame.f_code.co_filename.rsplit("/", 3)[-3:])
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
