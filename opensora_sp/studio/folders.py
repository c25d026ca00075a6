"""The folders that the studio reads and writes, and the videos that it has sampled there."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opensora_sp.checkpoint import find_weights
from opensora_sp.checkpoint.adapters import find_adapters
from opensora_sp.checkpoint.paths import committed_checkpoints
from opensora_sp.common.files import read_json, shipped_models
from opensora_sp.training.curves import modified

from . import UPLOADS

SAMPLING = "sample.py"  # next to weights, the config to sample from them; a training writes it
MEDIA = (".mp4", ".gif", ".png")
SHOWN = 100  # newest videos in the history


@dataclass(frozen=True)
class Result:
    """A sampled video and its metadata, by the names of the JSON file.

    Attributes:
        caption: differs between videos by the time and the number that begin the folder's name.
    """

    video: Path
    facts: dict[str, Any]
    caption: str

    @classmethod
    def read(cls, video: Path) -> Result:
        """Raises ValueError, OSError, KeyError or TypeError where there is no metadata."""
        facts = read_json(video.with_suffix(".json"))
        folder = video.parent.name[: len("20261231-235959-000")]
        return cls(video, facts, f"{facts['prompt']} | seed {facts['seed']} | {folder}")

    def delete(self) -> None:
        """Remove the video with its metadata, contact sheet and references."""
        folder = self.video.parent
        for path in folder.glob(f"{glob.escape(self.video.stem)}.*"):
            path.unlink()
        # Others may be there.
        with suppress(OSError):
            folder.rmdir()


class Folders:
    """Folders of runs and of the package's models, and the one of what the studio writes.

    Lists are newest first.
    """

    def __init__(self, runs: Sequence[str], outputs: str) -> None:
        """Make the folder of outputs, if need be."""
        Path(outputs).mkdir(parents=True, exist_ok=True)
        self.runs, self.outputs = [Path(run).resolve() for run in runs], Path(outputs).resolve()

    def checked(self, path: str | Path, *, executed: bool = False) -> Path:
        """The absolute path, without links; raises ValueError if it is outside of the folders.

        Args:
            executed: it may be code, or lie next to it: outside of the runs' folders, and among
                uploads, it is refused.
        """
        file, allowed = Path(path).resolve(), [*self.runs, *shipped_models()]
        if not executed:
            allowed.append(self.outputs)
        is_inside = any(file.is_relative_to(folder) for folder in allowed)
        if not is_inside or (executed and UPLOADS in file.parts):
            inside = " or ".join(map(str, allowed))
            raise ValueError(
                f"got the path {str(path)!r}; expected one inside of {inside}; choose another, or "
                "start the studio with its folder"
            )
        return file

    def trained(self) -> list[Path]:
        """Runs that have logged steps."""
        return self._holding("metrics.jsonl")

    def weights(self) -> list[Path]:
        """Runs and other folders of weights, each with its checkpoints; last the package's."""
        folders = list[Path]()
        for folder in self._holding(SAMPLING):
            with suppress(ValueError, OSError):  # adapters alone, or nothing yet
                find_weights(folder, ema=True)
                folders += [folder, *reversed(committed_checkpoints(folder))]
        return [*folders, *shipped_models()]

    def adapters(self) -> list[Path]:
        """Runs that have trained LoRA adapters."""
        return [path for path in self._holding(SAMPLING) if find_adapters(path) is not None]

    def history(self) -> list[Result]:
        """The newest videos that the studio has sampled."""
        results = list[Result]()
        for metadata in sorted(self.outputs.glob("*/*.json"), reverse=True)[:SHOWN]:
            # Another program's JSON is left out.
            with suppress(ValueError, OSError, KeyError, TypeError):
                if (video := video_of(metadata)) is not None:
                    results.append(Result.read(video))
        return results

    def _holding(self, name: str) -> list[Path]:
        patterns = (name, f"*/{name}", f"*/*/{name}")
        files = [path for root in self.runs for pattern in patterns for path in root.glob(pattern)]
        files.sort(key=modified, reverse=True)
        return list(dict.fromkeys(path.parent for path in files))


def short_names(paths: Sequence[Path]) -> dict[Path, str]:
    """The shortest ends of paths that differ; a checkpoint has at least its run in front."""
    names = {}
    for path in paths:
        length = 2 if path.name.startswith("step_") else 1
        while sum(other.parts[-length:] == path.parts[-length:] for other in paths) > 1:
            length += 1
        names[path] = "/".join(path.parts[-length:])
    return names


def video_of(metadata: Path) -> Path | None:
    """The video next to its metadata, or the single frame: an image of the same name is a sheet."""
    paths = (metadata.with_suffix(suffix) for suffix in MEDIA)
    return next((path for path in paths if path.is_file()), None)
