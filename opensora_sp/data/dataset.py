"""Captioned video files listed in a CSV manifest."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import av
from torch import Tensor
from torch.utils.data import Dataset

from .video import read_video, to_clip


@dataclass(frozen=True)
class Clip:
    """One sample: ``video`` ``[3, F, height, width]`` in [-1, 1], its caption and frame rate."""

    video: Tensor
    text: str
    fps: float


@dataclass(frozen=True)
class BrokenClip:
    """A file that could not be read, and why."""

    path: str
    reason: str


class VideoTextDataset(Dataset):
    """Clips of equal size from a manifest with the columns ``path`` and ``text``.

    Relative paths resolve against the manifest. A clip is the middle ``num_frames`` frames, every
    ``frame_interval``-th, resized and centre-cropped. Items that cannot be decoded come as ``BrokenClip``.

    Args:
        manifest: CSV file with a header line.
        num_frames, image_size: frames and (height, width) of every clip.
        frame_interval: take every n-th frame.
        cache: keep decoded clips in memory; for small sets.

    Raises:
        ValueError: if the manifest is missing, lacks a column, or lists nothing.
    """

    def __init__(
        self,
        manifest: str,
        *,
        num_frames: int,
        image_size: tuple[int, int],
        frame_interval: int = 1,
        cache: bool = False,
    ) -> None:
        self.rows = read_manifest(manifest)
        self.num_frames, self.image_size, self.frame_interval = num_frames, image_size, frame_interval
        self._cached: dict[int, Clip | BrokenClip] | None = {} if cache else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Clip | BrokenClip:
        if self._cached is None:
            return self._read(index)
        if index not in self._cached:
            self._cached[index] = self._read(index)
        return self._cached[index]

    def _read(self, index: int) -> Clip | BrokenClip:
        path, text = self.rows[index]
        try:
            frames, fps = read_video(path, num_frames=self.num_frames, interval=self.frame_interval)
            return Clip(to_clip(frames, self.image_size), text, fps)
        except (OSError, ValueError, IndexError, av.error.FFmpegError) as error:
            return BrokenClip(str(path), f"{type(error).__name__}: {error}")


def read_manifest(manifest: str | Path) -> list[tuple[Path, str]]:
    """(path, text) of every line of a CSV manifest."""
    manifest = Path(manifest)
    if not manifest.is_file():
        raise ValueError(
            f"got manifest {str(manifest)!r}, which is not a file; expected a CSV with the columns path,text; "
            "check dataset.manifest, or make a toy set with scripts/make_toy_clips.py"
        )
    with manifest.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        missing = [name for name in ("path", "text") if name not in columns]
        if missing:
            raise ValueError(
                f"got manifest {str(manifest)!r} with the columns {list(columns)}; expected path and text; "
                f"add {' and '.join(missing)} to its first line"
            )
        rows = [(manifest.parent / row["path"], row["text"] or "") for row in reader]
    if not rows:
        raise ValueError(f"got manifest {str(manifest)!r} without clips; expected at least one line; add clips to it")
    return rows
