"""The folders that the studio reads and writes; paths outside of them are refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from opensora_sp.checkpoint import find_weights
from opensora_sp.checkpoint.adapters import find_adapters
from opensora_sp.checkpoint.paths import committed_checkpoints
from opensora_sp.training.curves import modified

from . import UPLOADS

SAMPLING = "sample.py"  # next to weights, the config to sample from them; a training writes it
MEDIA = (".mp4", ".gif", ".png")


@dataclass(frozen=True)
class Folders:
    """Folders of runs, and the one of what the studio writes. Lists are newest first."""

    runs: tuple[Path, ...]
    outputs: Path

    @classmethod
    def of(cls, runs: Sequence[str], outputs: str) -> Folders:
        """Make the folder of outputs, if need be."""
        Path(outputs).mkdir(parents=True, exist_ok=True)
        return cls(tuple(Path(folder).resolve() for folder in runs), Path(outputs).resolve())

    def checked(self, path: str | Path, *, executed: bool = False) -> Path:
        """The absolute path, without links; raises ValueError if it is outside of the folders.

        Args:
            executed: it may be code, or lie next to it: outside of the runs' folders, and among
                uploads, it is refused.
        """
        file, allowed = Path(path).resolve(), self.runs if executed else (*self.runs, self.outputs)
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
        """Runs and other folders of weights, each followed by its checkpoints."""
        folders = list[Path]()
        for folder in self._holding(SAMPLING):
            with suppress(ValueError, OSError):  # adapters alone, or nothing yet
                find_weights(folder, ema=True)
                folders += [folder, *reversed(committed_checkpoints(folder))]
        return folders

    def adapters(self) -> list[Path]:
        """Runs that have trained LoRA adapters."""
        return [path for path in self._holding(SAMPLING) if find_adapters(path) is not None]

    def history(self) -> list[Path]:
        """Videos and images that the studio has sampled."""
        metadata = sorted(self.outputs.glob("*/*.json"), reverse=True)
        return [video for path in metadata if (video := video_of(path)) is not None]

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
        others = [other for other in paths if other != path]
        while any(other.parts[-length:] == path.parts[-length:] for other in others):
            length += 1
        names[path] = "/".join(path.parts[-length:])
    return names


def video_of(metadata: Path) -> Path | None:
    """The video next to its metadata, or the single frame: an image of the same name is a sheet."""
    paths = (metadata.with_suffix(suffix) for suffix in MEDIA)
    return next((path for path in paths if path.is_file()), None)
