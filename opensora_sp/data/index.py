"""A folder of videos and images, looked at file by file, as the lines of a manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .dataset import BrokenClip
from .manifest import Entry, Manifest
from .video import IMAGE_SUFFIXES, UNREADABLE, VIDEO_SUFFIXES, probe


@dataclass(frozen=True)
class Index:
    """What was found: lines for a manifest, in the order of their paths, and files that cannot be read."""

    entries: list[Entry]
    broken: list[BrokenClip]

    @property
    def without_caption(self) -> int:
        return sum(not entry.text for entry in self.entries)


def find_files(folder: Path) -> list[Path]:
    """Videos and images in a folder and its subfolders, sorted; hidden ones are left out. Links are followed, once.

    Raises:
        ValueError: if the folder does not exist or holds none.
    """
    if not folder.is_dir():
        raise ValueError(
            f"got folder {str(folder)!r}, which does not exist; expected videos or images; check the path"
        )
    known, found, seen = {*VIDEO_SUFFIXES, *IMAGE_SUFFIXES}, list[Path](), set[str]()
    for root, folders, names in os.walk(folder, followlinks=True):
        place = os.path.realpath(root)
        if (
            place in seen
        ):  # a link that leads back to where it stands, or the second of two to one place
            folders.clear()
            continue
        seen.add(place)
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(root, n)
            for n in names
            if Path(n).suffix.lower() in known and not n.startswith(".")
        ]
    if not found:
        raise ValueError(
            f"got folder {str(folder)!r} without videos and images; expected files named {', '.join(sorted(known))}; "
            "check the path"
        )
    return sorted(found)


def read_captions(manifest: str | Path) -> dict[Path, str]:
    """Captions by file from a manifest with path and text."""
    return {entry.path.resolve(): entry.text for entry in Manifest(manifest)}


def check_captions(captions: dict[Path, str], files: list[Path], manifest: str) -> None:
    """Raise ValueError unless at least one of the files has a caption in the manifest, before they are looked at."""
    if any(path.resolve() in captions for path in files):
        return
    first = next(iter(captions))
    raise ValueError(
        f"got --captions {manifest!r} with {len(captions)} captions, none of which is of one of the {len(files)} files "
        f"found (the first is of {str(first)!r}); expected paths relative to {manifest!r}, or absolute ones; correct "
        "the column path, or move the file"
    )


def index_files(
    files: list[Path],
    *,
    captions: dict[Path, str] | None = None,
    workers: int | None = None,
    on_file: Callable[[], object] = lambda: None,
) -> Index:
    """Probe files in parallel; threads, since FFmpeg works without Python's lock.

    Args:
        captions: by resolved path; where it has none, the caption is that of a file of the same name with the ending
            ``.txt``.
        workers: files looked at at a time, by default one for each core.
        on_file: called without arguments for each file done.
    """
    entries, broken = [], []
    for found in _probed(files, workers or os.cpu_count() or 1):
        on_file()
        if isinstance(found, BrokenClip):
            broken.append(found)
        else:
            text = (captions or {}).get(found.path.resolve()) or sidecar_caption(found.path)
            entries.append(found._replace(text=text))
    return Index(entries, broken)


def sidecar_caption(path: Path) -> str:
    """The text beside a file: ``clip.txt`` for ``clip.mp4``, on one line; empty where there is none."""
    text = path.with_suffix(".txt")
    return (
        " ".join(text.read_text(encoding="utf-8", errors="replace").split())
        if text.is_file()
        else ""
    )


def _probed(files: list[Path], workers: int) -> Iterator[Entry | BrokenClip]:
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(_probe, files)


def _probe(path: Path) -> Entry | BrokenClip:
    shown = os.fsencode(path).decode(errors="backslashreplace")
    if shown != str(path):
        return BrokenClip(shown, "its name is not UTF-8, in which a manifest is written; rename it")
    try:
        found = probe(path)
    except UNREADABLE as error:
        return BrokenClip(str(path), f"{type(error).__name__}: {error}")
    return Entry(
        path, "", found.num_frames, found.height, found.width, found.fps, found.height / found.width
    )
