"""Video files in and out, through PyAV.

Frames are uint8 RGB arrays ``[F, height, width, 3]``; clips for a model are float tensors ``[3, F, height, width]`` in
[-1, 1].
"""

from __future__ import annotations

import os
from fractions import Fraction
from itertools import islice
from pathlib import Path

import av
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def read_video(path: str | Path, *, num_frames: int, interval: int = 1) -> tuple[np.ndarray, float]:
    """Decode ``num_frames`` frames, every ``interval``-th, from the middle of a file.

    Returns:
        The frames and their rate in frames per second, the file's rate over ``interval``.

    Raises:
        ValueError: if the file has too few frames.
        OSError, av.error.FFmpegError: if it cannot be opened or decoded.
    """
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"  # many small files: threads cost more than they give
        rate = float(stream.average_rate or 24) / interval
        span = (num_frames - 1) * interval + 1
        available = stream.frames or _count_frames(path)
        start = max(0, available - span) // 2
        wanted = range(start, start + span, interval)
        decoded = enumerate(islice(container.decode(stream), wanted[-1] + 1))
        frames = [frame.to_ndarray(format="rgb24") for i, frame in decoded if i in wanted]
    if len(frames) < num_frames:
        raise ValueError(f"got {available} frames; expected at least {span}; use longer clips or fewer frames")
    return np.stack(frames), rate


def read_frames(path: str | Path) -> np.ndarray:
    """All frames of a video, or the one of an image.

    Raises:
        ValueError: if the file holds none, or cannot be decoded.
    """
    try:
        with av.open(str(path)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    except (OSError, av.error.FFmpegError, IndexError) as error:
        raise ValueError(
            f"got {str(path)!r}, which cannot be decoded ({error}); expected an image or a video; check the file"
        ) from None
    if not frames:
        raise ValueError(f"got {str(path)!r}, which holds no frames; expected an image or a video; check the file")
    return np.stack(frames)


def _count_frames(path: str | Path) -> int:
    """Frames of a file whose header does not tell."""
    with av.open(str(path)) as container:
        return sum(packet.size > 0 for packet in container.demux(container.streams.video[0]))


def to_clip(frames: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Resize so that the frame covers ``size`` (height, width), crop the centre, scale to [-1, 1]."""
    clip = torch.from_numpy(frames).permute(3, 0, 1, 2).float() / 127.5 - 1  # [3, F, h, w]
    have = clip.shape[-2:]
    if tuple(have) != tuple(size):
        factor = max(want / got for want, got in zip(size, have, strict=True))
        covering = [max(want, round(got * factor)) for want, got in zip(size, have, strict=True)]
        clip = F.interpolate(clip.transpose(0, 1), covering, mode="bilinear", antialias=True).transpose(0, 1)
        top, left = ((got - want) // 2 for got, want in zip(covering, size, strict=True))
        clip = clip[:, :, top : top + size[0], left : left + size[1]]
    return clip.contiguous()


def to_frames(clip: Tensor) -> np.ndarray:
    """``[3, F, height, width]`` in [-1, 1] -> uint8 frames."""
    return ((clip.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).cpu().numpy()


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
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    os.replace(partial, path)
