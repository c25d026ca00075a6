"""Reading and writing of video files, through PyAV.

Frames are uint8 RGB arrays ``[F, height, width, 3]``. Reading is bounded in size (``Limits``)
and in time, and nothing but the file itself is opened: playlists, URLs and patterns of names are
refused.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import av
import numpy as np

from opensora_sp.common.files import atomic_write, open_regular

from .limits import DEFAULT_BUDGET, DEFAULT_LIMITS, Budget, Limits
from .media_checks import FIRST_BOXES, JPEG, PNG, check_boxes, why_invalid, without_metadata

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
QUICKTIME_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2"
# Other demuxers of FFmpeg that open nothing but the file they are given: containers and animations,
# and some streams of one codec without a container.
VIDEO_FORMATS = (
    "matroska,webm,avi,flv,asf,ogg,mpeg,mpegts,mxf,nut,ivf,yuv4mpegpipe,h264,hevc,vvc,m4v,"
    "mpegvideo,mjpeg,av1,obu"
)
# Demuxers of images, which read a file whole; a damaged animation may be one frame.
IMAGE_FORMATS = (
    "gif,apng,image2,png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,ppm_pipe,pgm_pipe,gif_pipe,j2k_pipe,"
    "jpegxl_pipe"
)
# The most bytes of a pixel in an image file: four channels of 16 bits.
IMAGE_PIXEL_BYTES = 8
# Codecs whose frames ``without_metadata`` knows.
IMAGE_CODECS = {"png", "apng", "mjpeg", "webp"}
# Codecs of other images whose decoders read EXIF.
REFUSED_CODECS = {"tiff", "jpegls", "mjpegb", "thp", "smvjpeg", "amv", "sp5x"}
OTHER_CODECS = ",".join(sorted(av.codecs_available - IMAGE_CODECS - REFUSED_CODECS))


def read_video(
    path: str | Path,
    budget: Budget = DEFAULT_BUDGET,
    *,
    num_frames: int,
    interval: int = 1,
    start: int = 0,
    clip_frames: int | None = None,
) -> tuple[np.ndarray, float]:
    """Decode ``num_frames`` frames of a video, every ``interval``-th, or an image.

    Frames are counted in display order, as ``ffmpeg -fps_mode passthrough`` writes them, and
    rotated by the file's rotation.

    Args:
        budget: bounds of time and sizes; ``Budget.run`` also ends a call that does not return.
        start: the first frame, from 0.
        clip_frames: frames of the clip that these are a part of. The limits hold for all of it, so
            that ranks with parts of other lengths refuse the same files; ``num_frames`` by default.

    Returns:
        Frames ``[num_frames, height, width, 3]`` and their rate in frames per second, the file's
        rate over ``interval``.

    Raises:
        ValueError: if the file has too few frames, is larger than the limits, or some of these
            frames cannot be decoded.
        OSError, IndexError, av.error.FFmpegError: if it cannot be opened or decoded, or takes too
            long.
    """
    whole, span = clip_frames or num_frames, (num_frames - 1) * interval + 1
    last = start + span - 1
    with _opened(path, budget) as (container, stream):
        # Before a frame is decoded: the header suffices to refuse most.
        budget.limits.check("a clip", whole, stream.height, stream.width)
        rate = float(stream.average_rate or 24) / interval
        # Of the file and not of its first frame here: ranks read other parts of the clip.
        size = stream.height, stream.width
        numbered = _frames_from(container, stream, start, last, budget)
        pictures = _pictures(numbered, start, last, interval, size)
        frames = _stacked(pictures, num_frames, whole, budget.limits)

    if len(frames) == num_frames:
        return frames, rate
    # Too few frames, or frames that are there and cannot be decoded.
    available = count_frames(path, budget)
    if available >= start + span:
        lost = num_frames - len(frames)
        raise ValueError(f"{lost} of its frames {start} to {last} cannot be decoded")
    raise ValueError(
        f"got {available} frames; expected at least {start + span}; use longer clips or fewer "
        "frames"
    )


def _pictures(
    numbered: Iterator[tuple[int, Any]], start: int, last: int, interval: int, size: tuple[int, int]
) -> Iterator[np.ndarray]:
    """Every ``interval``-th frame from ``start`` to ``last``.

    Raises:
        ValueError: if a frame has another size than the file (``size``, height and width).
    """
    for number, frame in numbered:
        if start <= number <= last and (number - start) % interval == 0:
            _check_size((frame.height, frame.width), size)
            yield _upright(frame)
        if number >= last:
            return


def _stacked(
    pictures: Iterator[np.ndarray], num_frames: int, whole: int, limits: Limits
) -> np.ndarray:
    """At most ``num_frames``, of a clip of ``whole``, in one array of the first one's size."""
    frames, count_read = np.empty((0, 0, 0, 3), np.uint8), 0
    for picture in pictures:
        if not count_read:
            # A frame may be larger than its header states.
            limits.check("a clip", whole, *picture.shape[:2])
            frames = np.empty((num_frames, *picture.shape), np.uint8)

        _check_size(picture.shape, frames.shape[1:])
        frames[count_read] = picture
        count_read += 1
    return frames[:count_read]


def count_frames(path: str | Path, budget: Budget = DEFAULT_BUDGET) -> int:
    """Frames of a file: its packets without those that an edit list removes. Nothing is decoded.

    Raises:
        ValueError: as ``read_video`` does.
    """
    with _opened(path, budget) as (container, stream):
        return sum(1 for _ in _shown_packets(container, stream, budget))


@dataclass(frozen=True)
class Probed:
    """Frames and size of a file, after rotation; ``fps`` is None for an image."""

    num_frames: int
    height: int
    width: int
    fps: float | None


def probe(path: str | Path, limits: Limits = DEFAULT_LIMITS) -> Probed:
    """Probe a file: its first frame is decoded, the others are counted.

    Raises:
        ValueError: if it holds no frame, or is larger than the limits.
        OSError, IndexError, av.error.FFmpegError: if it cannot be opened or decoded, or takes more
            than ``limits.seconds``.
    """
    return Budget.of(limits.seconds, limits).run(partial(_probe, path))


def _probe(path: str | Path, budget: Budget) -> Probed:
    with _opened(path, budget) as (container, stream):
        first = next(_decoded(container, stream, budget), None)
        if first is None:
            raise ValueError("it holds no frame")
        height, width, _ = _upright(first).shape
        budget.limits.check("a file", 1, height, width)
        fps = float(stream.average_rate) if stream.average_rate else None
    num_frames = count_frames(path, budget)
    return Probed(num_frames, height, width, fps if num_frames > 1 else None)


@contextmanager
def _opened(path: str | Path, budget: Budget) -> Iterator[tuple[Any, Any]]:
    """A file and its first video stream, decoded by one thread: loaders have many processes."""
    formats, image = _examine(path, budget)
    options = {
        "format_whitelist": formats,
        # Opening decodes first frames, in a container before ``_decoded`` can change them.
        "codec_whitelist": OTHER_CODECS if image is None else ",".join(IMAGE_CODECS),
        "protocol_whitelist": "file",
        # The image %03d.png is one file, not a series.
        "pattern_type": "none",
    }
    # The decoder refuses larger frames before it allocates them, whatever a header states. It
    # counts rows of a multiple of 64 pixels.
    pixels = budget.limits.frame_pixels
    max_pixels = {"max_pixels": str(pixels + 128 * math.isqrt(pixels))}

    try:
        opened = av.open(
            f"file:{path}" if image is None else io.BytesIO(image),
            timeout=budget.time_limit,
            container_options=options,
            options=max_pixels,
            # Titles that are not UTF-8.
            metadata_errors="replace",
        )
    except av.error.ArgumentError:
        raise ValueError(
            why_invalid(path)
            or "got a file of a format that is not read; expected a video, or an image of at most "
            f"{IMAGE_PIXEL_BYTES} bytes for each of limits.frame_pixels; convert it"
        ) from None
    except (av.error.InvalidDataError, av.error.EOFError) as error:
        reason = f"the file is damaged or incomplete, or of another format ({error})"
        raise ValueError(why_invalid(path) or reason) from None

    with opened as container:
        stream = next(iter(container.streams.video), None)
        # A file of sound alone, or a codec that FFmpeg was built without.
        if stream is None or stream.codec_context is None:
            raise ValueError("it holds no video that can be decoded")
        if stream.codec_context.name in REFUSED_CODECS:
            raise ValueError(
                f"got images of the format {stream.codec_context.name}; expected a format whose "
                "metadata is bounded; convert them to PNG or JPEG"
            )

        # FFmpeg states no size of an image that it has refused to decode.
        if not stream.height:
            raise ValueError(
                "got a file whose frames have no size, or a larger one; expected at most "
                f"{budget.limits.frame_pixels:,} pixels in a frame (limits.frame_pixels); make it "
                "smaller"
            )
        budget.limits.check("a file", 1, stream.height, stream.width)

        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        stream.codec_context.options = max_pixels
        yield container, stream


def _examine(path: str | Path, budget: Budget) -> tuple[str, bytes | None]:
    """The formats that a file may have, and its bytes without metadata if it is such an image.

    Raises:
        OSError: if it is no regular file.
        ValueError: if its header is compressed.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(12)
        if start[4:8] in FIRST_BOXES:
            check_boxes(file, size, budget)
            return QUICKTIME_FORMATS, None
        # Demuxers of images read a file whole, so a larger file is tried as a video alone.
        if size > IMAGE_PIXEL_BYTES * budget.limits.frame_pixels:
            return VIDEO_FORMATS, None

        formats = f"{VIDEO_FORMATS},{IMAGE_FORMATS}"
        if start.startswith((PNG, JPEG)) or start[8:] == b"WEBP":
            return formats, without_metadata(start + file.read())
        return formats, None


def _decoded(container: Any, stream: Any, budget: Budget) -> Iterator[Any]:
    """All frames from the current position on."""
    try:
        for packet in container.demux(stream):
            if stream.codec_context.name in IMAGE_CODECS and packet.size:
                packet.update(without_metadata(bytes(packet)))
            for frame in packet.decode():
                budget.check_time()
                yield frame
    except av.error.ArgumentError:
        raise ValueError(
            "got a frame that FFmpeg refuses to decode, which its header may state as smaller; "
            f"expected at most {budget.limits.frame_pixels:,} pixels (limits.frame_pixels); make "
            "it smaller"
        ) from None


def _shown_packets(container: Any, stream: Any, budget: Budget) -> Iterator[Any]:
    number = 0
    for packet in container.demux(stream):
        budget.check_time()
        # Demuxers end a stream with an empty packet.
        if packet.size and not packet.is_discard:
            number += 1
            budget.limits.check_file(number)
            yield packet


def _check_size(size: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if size != expected:
        raise ValueError(f"its frames differ in size: {size[:2]} after {expected[:2]}")


def _frames_from(
    container: Any, stream: Any, start: int, last: int, budget: Budget
) -> Iterator[tuple[int, Any]]:
    """(number, frame), from some frame at or before ``start`` on.

    Far into a file, decoding starts at the last key frame before ``start``. Near its start, and in
    files without usable display times, all frames are decoded and counted.
    """
    times = []
    if start > READ_AHEAD and stream.codec_context.name in ONE_FRAME_PER_PACKET:
        times = _display_times(container, stream, last, budget)
    if start < len(times):
        keys = [pts for pts, is_key in times[: start + 1] if is_key]
        container.seek(max(keys, default=times[0][0]), stream=stream)

        # By display time: after a seek, nothing else states which frame of the file is decoded.
        numbers = {pts: number for number, (pts, _) in enumerate(times)}
        decoded = _decoded(container, stream, budget)
        frames = ((numbers[frame.pts], frame) for frame in decoded if frame.pts in numbers)
        first = next(frames, None)
        if first is not None and first[0] <= start:
            yield first
            yield from frames
            return
        # The seek went too far, as in MPEG-TS, which has no index.
        container.seek(0)
    yield from zip(count(), _decoded(container, stream, budget))


def _display_times(
    container: Any, stream: Any, last: int, budget: Budget
) -> list[tuple[int, bool]]:
    """Display time of each frame up to ``last``, in order, and whether it is a key frame.

    Empty where times are missing or repeated.
    """
    # Packets come in decoding order; a few later ones may be shown before the last frame.
    packets = islice(_shown_packets(container, stream, budget), last + 1 + MAX_REORDERING)
    times = [(packet.pts, packet.is_keyframe) for packet in packets]
    container.seek(0)
    distinct = {pts for pts, _ in times}
    return sorted(times) if None not in distinct and len(distinct) == len(times) else []


def _upright(frame: Any) -> np.ndarray:
    """``[height, width, 3]``, rotated by the file's multiple of 90 degrees."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))


def read_frames(path: str | Path, limits: Limits = DEFAULT_LIMITS) -> np.ndarray:
    """All frames of a video, or the one of an image.

    Raises:
        ValueError: if the file holds none, is larger than the limits, or cannot be decoded within
            ``limits.seconds``.
    """
    try:
        return Budget.of(limits.seconds, limits).run(partial(_read_frames, path))
    except UNREADABLE as error:
        raise ValueError(
            f"got {str(path)!r}, which cannot be decoded ({error}); expected an image or a video; "
            "check the file"
        ) from None


def _read_frames(path: str | Path, budget: Budget) -> np.ndarray:
    num_frames, frames = count_frames(path, budget), list[np.ndarray]()
    with _opened(path, budget) as (container, stream):
        budget.limits.check("a file", num_frames, stream.height, stream.width)
        for frame in _decoded(container, stream, budget):
            frames.append(_upright(frame))
            _check_size(frames[-1].shape, frames[0].shape)
            budget.limits.check("a file", len(frames), *frames[0].shape[:2])

    if not frames:
        raise ValueError("it holds no frames")
    return np.stack(frames)


def write_video(path: str | Path, frames: np.ndarray, *, fps: float) -> None:
    """Write frames as H.264 mp4, see ``Mp4``. The file appears when it is complete."""
    with atomic_write(Path(path)) as partial_path:
        video = Mp4(partial_path, fps)
        video.add(frames)
        video.close()


class Mp4:
    """H.264 in mp4; odd sizes lose their last row or column.

    Frames uint8 ``[F, height, width, 3]`` are added in pieces.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self.container, self.fps = av.open(str(path), mode="w"), fps
        self.stream: Any = None

    def add(self, frames: np.ndarray) -> None:
        # yuv420p needs even sizes.
        height, width = (side // 2 * 2 for side in frames.shape[1:3])
        if self.stream is None:
            rate = Fraction(self.fps).limit_denominator(1000)
            self.stream = self.container.add_stream("libx264", rate=rate)
            self.stream.height, self.stream.width, self.stream.pix_fmt = height, width, "yuv420p"
            self.stream.options = {"crf": "12", "preset": "veryfast", "threads": "1"}

        for frame in frames[:, :height, :width]:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            self.container.mux(self.stream.encode(picture))

    def close(self) -> None:
        # The encoder may hold frames back.
        if self.stream is not None:
            self.container.mux(self.stream.encode())
        self.container.close()
