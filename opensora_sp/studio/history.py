"""The videos that the studio has sampled: found, shown as thumbnails, and deleted."""

from __future__ import annotations

import glob
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from opensora_sp.common.files import read_json
from opensora_sp.data import read_video

from .folders import Folders

SHOWN = 60  # newest videos; older ones are found by words
SIDE = 256  # pixels of a thumbnail


@dataclass(frozen=True)
class Result:
    """A sampled video and its metadata, by the names of the JSON file."""

    video: Path
    facts: dict[str, Any]

    @classmethod
    def read(cls, video: Path) -> Result:
        """Raises ValueError or OSError where there is no metadata."""
        return cls(video, read_json(video.with_suffix(".json")))

    @property
    def caption(self) -> str:
        """Differs between videos by the time and the number that begin the folder's name."""
        folder = self.video.parent.name[: len("20261231-235959-000")]
        return f"{self.facts['prompt']} | seed {self.facts['seed']} | {folder}"


def results(folders: Folders, words: str = "") -> list[Result]:
    """The newest videos whose captions or checkpoints have all the words."""
    shown = list[Result]()
    for video in folders.history():
        with suppress(ValueError, OSError, KeyError, TypeError):  # another program's JSON
            result = Result.read(video)
            text = f"{result.caption} {result.facts['ckpt']}".lower()
            if all(word in text for word in words.lower().split()):
                shown.append(result)
        if len(shown) == SHOWN:
            break
    return shown


@lru_cache(4 * SHOWN)
def thumbnail(video: Path, written: int) -> Image.Image:
    """The frame in the middle; gray for a video that cannot be read.

    Args:
        written: when, so that another video of the same name is read again.
    """
    image = Image.new("RGB", (SIDE, SIDE), "gray")
    with suppress(ValueError, OSError, IndexError):
        image = Image.fromarray(read_video(video, num_frames=1)[0][0])
    image.thumbnail((SIDE, SIDE))
    return image


def delete(video: Path) -> None:
    """Remove a video with its metadata, contact sheet and references, and its folder if empty."""
    for path in video.parent.glob(f"{glob.escape(video.stem)}.*"):
        path.unlink()
    with suppress(OSError):
        video.parent.rmdir()
