"""Stack inspection: the line of source that a thread runs, outside of torch and of the watchdog."""

from __future__ import annotations

import sys
import traceback
import warnings
from pathlib import Path
from types import FrameType

import torch
import typing_extensions

_SKIPPED = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    # They wrap deprecated functions, as some collectives of torch 2.14 are.
    typing_extensions.__file__,
    warnings.__file__,
)


def location_of_thread(thread: int) -> str:
    """The line of a thread, as in ``location``."""
    frame = sys._current_frames().get(thread)
    return "an unknown place" if frame is None else location(frame)


def stack_of_thread(thread: int) -> str:
    """The whole stack of a thread, outermost frame first."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame))


def location(frame: FrameType) -> str:
    """``folder/file.py:line (function)`` of the innermost frame outside torch and this folder."""
    while frame.f_code.co_filename.startswith(_SKIPPED) and frame.f_back is not None:
        frame = frame.f_back
    file = "/".join(frame.f_code.co_filename.rsplit("/", 3)[-3:])
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
