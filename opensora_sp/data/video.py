"""Reading and writing of video files, through PyAV.

Frames are uint8 RGB arrays ``[F, height, width, 3]``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, islice
from pathlib import Path
from typing import Any

import av
import numpy as np

from opensora_sp.regular_file import open_regular

from .atomic import atomic_write

IMAGE_SUFFIXES = (".gif", ".jpeg", ".jpg", ".png", ".webp")
VIDEO_SUFFIXES = (".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
UNREADABLE = (OSError, ValueError, IndexError, av.error.FFmpegError)
"""Exceptions of reading a corrupt file."""
# Codecs with one displayed frame in every packet.
ONE_FRAME_PER_PACKET = ("h264", "hevc", "vp9", "av1", "mpeg4", "mjpeg", "prores")
# More packets than H.264 and HEVC allow between decoding order and display order.
MAX_REORDERING = 17
# Up to so many frames from the start of a file are decoded rather than looking for a key frame.
READ_AHEAD = 24


def read_video(
    path: str | Path,
    *,
    num_frames: int,
    interval: int = 1,
    start: int | None = None,
    time_limit: float | None = None,
) -> tuple[np.ndarray, float]:
    """Decode ``num_frames`` frames of a video, every ``interval``-th, or an image.

    Frames are counted in display order, as ``ffmpeg -fps_mode passthrough`` writes them, and
    rotated by the file's rotation.

    Args:
        start: the first frame, from 0; by default the frames in the middle of the file.
        time_limit: seconds that opening and decoding may take together.

    Returns:
        Frames ``[num_frames, height, width, 3]`` and their rate in frames per second, the file's
        rate over ``interval``.

    Raises:
        ValueError: if the file has too few frames, or some of these cannot be decoded.
        OSError, IndexError, av.error.FFmpegError: if it cannot be opened or decoded, or takes too
            long.
    """
    span = (num_frames - 1) * interval + 1
    if start is None:
        start = max(0, count_frames(path, time_limit=time_limit) - span) // 2

    deadline = time.monotonic() + (time_limit or float("inf"))
    frames = []
    with _opened(path, time_limit) as (container, stream):
        rate = float(stream.average_rate or 24) / interval
        last = start + span - 1
        for number, frame in _frames_from(container, stream, start, last):
            if time.monotonic() > deadline:
                raise TimeoutError(f"decoding took longer than {time_limit:g} s")
            if start <= number <= last and (number - start) % interval == 0:
                frames.append(_upright(frame))
            if number >= last:
                break

    if len(frames) == num_frames:
        return np.stack(frames), rate
    available = count_frames(path)
    if available >= start + span:
        lost = num_frames - len(frames)
        raise ValueError(f"{lost} of its frames {start} to {last} cannot be decoded")
    raise ValueError(
        f"got {available} frames; expected at least {start + span}; use longer clips or fewer "
        "frames"
    )


def count_frames(path: str | Path, *, time_limit: float | None = None) -> int:
    """Frames of a file: its packets without those that an edit list removes. Nothing is decoded."""
    with _opened(path, time_limit) as (container, stream):
        return sum(1 for _ in _shown_packets(container, stream))


@dataclass(frozen=True)
class Probed:
    """Frames and size of a file, after rotation; ``fps`` is None for an image."""

    num_frames: int
    height: int
    width: int
    fps: float | None


def probe(path: str | Path) -> Probed:
    """Probe a file: its first frame is decoded, the others are counted.

    Raises:
        ValueError: if it holds no frame.
        OSError, IndexError, av.error.FFmpegError: if it cannot be opened or decoded.
    """
    with _opened(path) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise ValueError("it holds no frame")
        height, width, _ = _upright(first).shape
        fps = float(stream.average_rate) if stream.average_rate else None
    num_frames = count_frames(path)
    return Probed(num_frames, height, width, fps if num_frames > 1 else None)


@contextmanager
def _opened(path: str | Path, time_limit: float | None = None) -> Iterator[tuple[Any, Any]]:
    """A file and its first video stream, decoded by one thread: loaders have many processes."""
    open_regular(path).close()
    with av.open(str(path), timeout=time_limit) as container:
        stream = next(iter(container.streams.video), None)
        # A file of sound alone, or a codec that FFmpeg was built without.
        if stream is None or stream.codec_context is None:
            raise ValueError("it holds no video that can be decoded")
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        yield container, stream


def _shown_packets(container: Any, stream: Any) -> Iterator[Any]:
    return (packet for packet in container.demux(stream) if packet.size and not packet.is_discard)


def _frames_from(container: Any, stream: Any, start: int, last: int) -> Iterator[tuple[int, Any]]:
    """(number, frame), from some frame at or before ``start`` on.

    Far into a file, decoding starts at the last key frame before ``start``. Near its start, and in
    files without usable display times, all frames are decoded and counted.
    """
    times = []
    if start > READ_AHEAD and stream.codec_context.name in ONE_FRAME_PER_PACKET:
        times = _display_times(container, stream, last)
    if start < len(times):
        keys = [pts for pts, is_key in times[: start + 1] if is_key]
        container.seek(max(keys, default=times[0][0]), stream=stream)

        numbers = {pts: number for number, (pts, _) in enumerate(times)}
        decoded = container.decode(stream)
        frames = ((numbers[frame.pts], frame) for frame in decoded if frame.pts in numbers)
        first = next(frames, None)
        if first is not None and first[0] <= start:
            yield first
            yield from frames
            return
        # The seek went too far, as in MPEG-TS, which has no index.
        container.seek(0)
    yield from zip(count(), container.decode(stream))


def _display_times(container: Any, stream: Any, last: int) -> list[tuple[int, bool]]:
    """Display time of each frame up to ``last``, in order, and whether it is a key frame.

    Empty where times are missing or repeated.
    """
    packets = islice(_shown_packets(container, stream), last + 1 + MAX_REORDERING)
    times = [(packet.pts, packet.is_keyframe) for packet in packets]
    container.seek(0)
    distinct = {pts for pts, _ in times}
    return sorted(times) if None not in distinct and len(distinct) == len(times) else []


def _upright(frame: Any) -> np.ndarray:
    """``[height, width, 3]``, rotated by the file's multiple of 90 degrees."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))


def read_frames(path: str | Path) -> np.ndarray:
    """All frames of a video, or the one of an image.

    Raises:
        ValueError: if the file holds none, or cannot be decoded.
    """
    try:
        open_regular(path).close()
        with av.open(str(path)) as container:
            frames = [_upright(frame) for frame in container.decode(video=0)]
        if not frames:
            raise ValueError("it holds no frames")
        return np.stack(frames)
    # Frames of two sizes are unreadable, too.
    except UNREADABLE as error:
        raise ValueError(
            f"got {str(path)!r}, which cannot be decoded ({error}); expected an image or a video; "
            "check the file"
        ) from None


def write_video(path: str | Path, frames: np.ndarray, *, fps: float) -> None:
    """Write frames as H.264 mp4; odd sizes lose their last line. The file appears when complete."""
    # yuv420p halves both sides.
    height, width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2

    with atomic_write(Path(path)) as partial, av.open(str(partial), mode="w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.options = {"crf": "12", "preset": "veryfast", "threads": "1"}
        for pixels in frames[:, :height, :width]:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(frame))
        # What the encoder still holds back.
        container.mux(stream.encode())
