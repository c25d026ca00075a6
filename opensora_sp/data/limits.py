"""The largest frames, clips and files that are decoded or sampled."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Result = TypeVar("Result")


class Limits(BaseModel):
    """Largest sizes of files that are decoded, and of videos that are sampled.

    The headers of a file are checked before anything is decoded. A header may be wrong, so
    decoded frames are checked as well.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    frame_pixels: int = Field(1 << 26, ge=1)
    """Height x width of a frame; the default is 8192 x 8192."""

    clip_frames: int = Field(1 << 16, ge=1)
    """Frames of a clip, a reference or a sampled video, all its loops; the default is 65,536."""

    clip_bytes: int = Field(16 << 30, ge=1)
    """Bytes of all frames of a clip, a reference or a part of a sampled video: 3 x frames x height
    x width; the default is 16 GiB."""

    file_frames: int = Field(1 << 22, ge=1)
    """Frames of a file that clips are cut from; the default is about 48 hours."""

    seconds: float = Field(60.0, gt=0)
    """Seconds to open and decode a reference; `dataset.time_limit` holds for training clips."""

    def check(self, what: str, num_frames: int, height: int, width: int) -> None:
        """Raise ValueError if a clip is too large to be decoded or sampled.

        Args:
            what: is too large, for errors.
        """
        measured = {
            "frame_pixels": (height * width, "pixels in a frame"),
            "clip_frames": (num_frames, "frames"),
            "clip_bytes": (3 * num_frames * height * width, "bytes in memory"),
        }
        for name, (number, unit) in measured.items():
            if number > getattr(self, name):
                frames = "1 frame" if num_frames == 1 else f"{num_frames:,} frames"
                size = f"{what} of {frames} of {height:,} x {width:,} pixels"
                raise self._refusal(f"{size}, {number:,} {unit}", name)

    def check_file(self, num_frames: int) -> None:
        """Raise ValueError if a file has too many frames to look for a clip in it."""
        if num_frames > self.file_frames:
            raise self._refusal(f"a file of at least {num_frames:,} frames", "file_frames")

    def _refusal(self, excess: str, name: str) -> ValueError:
        return ValueError(
            f"got {excess}; expected at most {getattr(self, name):,} (limits.{name}); make it "
            f"smaller, or raise limits.{name} if there is memory for it"
        )


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Budget:
    """Bounds of reading one file: ``limits``, and ``time_limit`` seconds until ``deadline``."""

    limits: Limits
    time_limit: float | None
    deadline: float

    @classmethod
    def of(cls, time_limit: float | None, limits: Limits) -> Budget:
        """A budget of so many seconds from now on; None is no limit."""
        return cls(limits, time_limit, time.monotonic() + (time_limit or float("inf")))

    def check_time(self) -> None:
        """Raise TimeoutError after the deadline."""
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"decoding took longer than {self.time_limit:g} s")

    def run(self, read: Callable[[Budget], Result]) -> Result:
        """Call ``read``, which checks the time itself, unless a call of the system does not return.

        A file system that does not answer blocks ``open`` and ``read`` without a limit. Such a call
        stays behind, in a thread that does not keep the process alive.

        Raises:
            TimeoutError: if the time is up.
            Exception: what ``read`` raises.
        """
        if self.time_limit is None:
            return read(self)

        # Other threads take idle ones as well.
        try:
            calls = _idle_threads.pop()
        except IndexError:
            calls = _start_thread()
        done: Future[Result] = Future()
        calls.put((partial(read, self), done))
        # The exception of ``read`` may be a TimeoutError as well.
        if wait([done], self.time_limit).done:
            _idle_threads.append(calls)
            return done.result()

        # The thread ends once its call returns.
        calls.put(None)
        raise TimeoutError(f"opening and decoding took longer than {self.time_limit:g} s")


DEFAULT_BUDGET = Budget.of(None, DEFAULT_LIMITS)
# Threads that read live on: glibc keeps an arena of memory for each new one, which fills up over
# thousands of clips.
_idle_threads: list[SimpleQueue[Any]] = []
os.register_at_fork(after_in_child=_idle_threads.clear)


def _start_thread() -> SimpleQueue[Any]:
    calls: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_serve, args=(calls,), daemon=True, name="reading a file").start()
    return calls


def _serve(calls: SimpleQueue[Any]) -> None:
    """Call functions until there is None in place of one."""
    while (call := calls.get()) is not None:
        read, done = call
        try:
            done.set_result(read())
        except BaseException as error:
            done.set_exception(error)
        # Frames are not kept until the next call.
        del call, read, done
