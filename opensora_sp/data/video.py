"""Video files in and out, through PyAV.

Frames are uint8 RGB arrays ``[F, height, width, 3]``.
"""

from __future__ import annotations

import os
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

IMAGE_SUFFIXES = (".gif", ".jpeg", ".jpg", ".png", ".webp")
VIDEO_SUFFIXES = (".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
UNREADABLE = (OSError, ValueError, IndexError, av.error.FFmpegError)
"""What reading a broken file may raise."""
SHOWN_ONCE = (
    "h264",
    "hevc",
    "vp9",
    "av1",
    "mpeg4",
    "mjpeg",
    "prores",
)  # codecs whose every packet shows one frame
REORDERED = (
    17  # more packets than H.264 and HEVC allow between the orders of decoding and of showing
)
READ_AHEAD = (
    24  # frames decoded for nothing from the start of a file, rather than looking for a key frame
)


def read_video(
    path: str | Path,
    *,
    num_frames: int,
    interval: int = 1,
    start: int | None = None,
    time_limit: float | None = None,
) -> tuple[np.ndarray, float]:
    """Decode ``num_frames`` frames, every ``interval``-th, of a video, or the one frame of an image.

    Frames are counted in the order in which they are shown, as ``ffmpeg -fps_mode passthrough`` writes them, and turned
    as the file's rotation says.

    Args:
        start: the first frame, from 0; by default the frames are those in the middle of the file.
        time_limit: seconds that opening and decoding may take together.

    Returns:
        Frames ``[num_frames, height, width, 3]`` and their rate in frames per second, the file's rate over
        ``interval``.

    Raises:
        ValueError: if the file has too few frames, or some of these cannot be decoded.
        OSError, IndexError, av.error.FFmpegError: if it cannot be opened or decoded, or takes too long.
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
    if len(frames) < num_frames:
        available = count_frames(path)
        if available >= start + span:
            raise ValueError(
                f"{num_frames - len(frames)} of its frames {start} to {last} cannot be decoded"
            )
        raise ValueError(
            f"got {available} frames; expected at least {start + span}; use longer clips or fewer frames"
        )
    return np.stack(frames), rate


def count_frames(path: str | Path, *, time_limit: float | None = None) -> int:
    """Frames of a file: its packets but those that an edit list cuts away. Nothing is decoded."""
    with _opened(path, time_limit) as (container, stream):
        return sum(1 for _ in _shown_packets(container, stream))


@dataclass(frozen=True)
class Probed:
    """What a file holds: frames as they are read, upright; ``fps`` is None for an image."""

    num_frames: int
    height: int
    width: int
    fps: float | None


def probe(path: str | Path) -> Probed:
    """Look at a file: its first frame is decoded, the others are counted.

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
    """A file and its first video stream, decoded by this thread alone: workers are what works in parallel here."""
    with av.open(str(path), timeout=time_limit) as container:
        stream = next(iter(container.streams.video), None)
        if (
            stream is None or stream.codec_context is None
        ):  # sound alone, or a codec that FFmpeg was built without
            raise ValueError("it holds no video that can be decoded")
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        yield container, stream


def _shown_packets(container: Any, stream: Any) -> Iterator[Any]:
    return (packet for packet in container.demux(stream) if packet.size and not packet.is_discard)


def _frames_from(container: Any, stream: Any, start: int, last: int) -> Iterator[tuple[int, Any]]:
    """(number, frame) from some frame at or before ``start`` on.

    Far into a file, decoding starts at the last key frame before ``start``, which the packets' times of showing tell.
    Where a codec has packets that show nothing, or times are missing or repeated, all frames are decoded and counted.
    """
    if start > READ_AHEAD and stream.codec_context.name in SHOWN_ONCE:
        packets = islice(_shown_packets(container, stream), last + 1 + REORDERED)
        times = [(packet.pts, packet.is_keyframe) for packet in packets]
        container.seek(0)
        if len({pts for pts, _ in times}) == len(times) and all(
            pts is not None for pts, _ in times
        ):
            times.sort()
            if start < len(times):
                key = max(
                    (pts for pts, is_key in times[: start + 1] if is_key), default=times[0][0]
                )
                container.seek(key, stream=stream)
                numbers = {pts: number for number, (pts, _) in enumerate(times)}
                frames = (
                    (numbers[frame.pts], frame)
                    for frame in container.decode(stream)
                    if frame.pts in numbers
                )
                first = next(frames, None)
                if first is not None and first[0] <= start:
                    yield first
                    yield from frames
                    return
                container.seek(0)  # it landed too late, as in MPEG-TS, which has no index
    yield from zip(count(), container.decode(stream))


def _upright(frame: Any) -> np.ndarray:
    """``[height, width, 3]``, turned by a multiple of 90 degrees as the file says."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))


def read_frames(path: str | Path) -> np.ndarray:
    """All frames of a video, or the one of an image.

    Raises:
        ValueError: if the file holds none, or cannot be decoded.
    """
    try:
        with av.open(str(path)) as container:
            frames = [_upright(frame) for frame in container.decode(video=0)]
        if not frames:
            raise ValueError("it holds no frames")
        return np.stack(frames)
    except UNREADABLE as error:  # frames of two sizes among them
        raise ValueError(
            f"got {str(path)!r}, which cannot be decoded ({error}); expected an image or a video; check the file"
        ) from None


def write_video(path: str | Path, frames: np.ndarray, *, fps: float) -> None:
    """Write frames as H.264 mp4; odd sizes lose their last line. The file appears under its name when complete."""
    path = Path(path)
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    _, height, width, _ = frames.shape
    height, width = height // 2 * 2, width // 2 * 2  # yuv420p halves both
    with av.open(str(partial), mode="w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.options = {"crf": "12", "preset": "veryfast", "threads": "1"}
        for frame in frames[:, :height, :width]:
            container.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
                )
            )
        container.mux(stream.encode())
    os.replace(partial, path)
