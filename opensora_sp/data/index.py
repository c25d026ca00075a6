"""Probe a folder of videos and images, file by file, for the lines of a manifest."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from opensora_sp.common.files import read_small_file

from .dataset import CorruptSample
from .limits import DEFAULT_LIMITS, Limits
from .manifest import Entry, Manifest
from .video import IMAGE_SUFFIXES, UNREADABLE, VIDEO_SUFFIXES, probe

MAX_CAPTION_BYTES = 1 << 20


@dataclass(frozen=True)
class Index:
    """Lines for a manifest, in the order of their paths, and the files that cannot be read."""

    entries: list[Entry]
    corrupt: list[CorruptSample]


def find_files(folder: Path) -> list[Path]:
    """Videos and images in a folder and its subfolders, sorted.

    Hidden files are skipped. Links are followed, once.

    Raises:
        ValueError: if the folder does not exist or holds none.
    """
    known = {*VIDEO_SUFFIXES, *IMAGE_SUFFIXES}
    files: list[Path] = []
    visited: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        real_path = os.path.realpath(root)
        # A link to a parent folder, or the second of two links to one folder.
        if real_path in visited:
            folders.clear()
            continue

        visited.add(real_path)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if Path(name).suffix.lower() in known and not name.startswith("."):
                files.append(Path(root, name))
    if not files:
        problem = "has no videos and images" if folder.is_dir() else "is no folder"
        raise ValueError(
            f"got folder {str(folder)!r}, which {problem}; expected files named "
            f"{', '.join(sorted(known))}; check the path"
        )
    return sorted(files)


def read_captions(manifest: str | Path) -> dict[Path, str]:
    """The captions of a manifest by file."""
    return {Path(os.path.realpath(entry.path)): entry.text for entry in Manifest(manifest)}


def check_captions(captions: dict[Path, str], files: list[Path], manifest: str) -> None:
    """Raise ValueError unless at least one of the files has a caption in the manifest."""
    if any(Path(os.path.realpath(path)) in captions for path in files):
        return
    first = next(iter(captions))
    raise ValueError(
        f"got --captions {manifest!r} with {len(captions)} captions, none of which is of one of "
        f"the {len(files)} files found (the first is of {str(first)!r}); expected paths relative "
        f"to {manifest!r}, or absolute ones; correct the column path, or move the file"
    )


def index_files(
    files: list[Path],
    *,
    captions: dict[Path, str] | None = None,
    workers: int | None = None,
    on_file: Callable[[], object] = lambda: None,
    limits: Limits = DEFAULT_LIMITS,
) -> Index:
    """Probe files in parallel threads: FFmpeg releases Python's lock.

    Args:
        captions: by resolved path; where it has none, the caption is read from a file of the same
            name with the suffix ``.txt``.
        workers: files probed at a time, by default one for each core.
        on_file: called without arguments for each file done.
        limits: largest frames and files, and seconds for each; larger ones count as corrupt.
    """
    entries, corrupt = [], []
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for probed in pool.map(partial(_probe, limits=limits), files):
            on_file()
            if isinstance(probed, Entry):
                probed = _captioned(probed, captions or {})
            if isinstance(probed, Entry):
                entries.append(probed)
            else:
                corrupt.append(probed)
    return Index(entries, corrupt)


def relative_entries(entries: list[Entry], manifest: Path) -> list[Entry]:
    """The lines with paths relative to the folder of the manifest that they are written to."""
    folder = manifest.parent.resolve()
    return [
        entry._replace(path=Path(os.path.relpath(entry.path.resolve(), folder)))
        for entry in entries
    ]


def _captioned(entry: Entry, captions: dict[Path, str]) -> Entry | CorruptSample:
    try:
        text = captions.get(entry.path.resolve()) or sidecar_caption(entry.path)
    except ValueError as error:
        return CorruptSample(str(entry.path), str(error))
    return entry._replace(text=text)


def sidecar_caption(path: Path) -> str:
    """The text in ``clip.txt`` next to ``clip.mp4``, on one line; empty where there is none.

    Raises:
        ValueError: if it is longer than ``MAX_CAPTION_BYTES``, or not UTF-8.
    """
    file = path.with_suffix(".txt")
    if not file.is_file():
        return ""
    content = read_small_file(file, MAX_CAPTION_BYTES, "a caption")
    try:
        return " ".join(content.decode("utf-8-sig").split())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"got {str(file)!r}, of which line {line} is not UTF-8; expected a caption in UTF-8; "
            "save it as that"
        ) from None


def _probe(path: Path, limits: Limits) -> Entry | CorruptSample:
    # Linux allows any bytes in a name.
    shown = os.fsencode(path).decode(errors="backslashreplace")
    if shown != str(path):
        reason = "its name is not UTF-8, in which a manifest is written; rename it"
        return CorruptSample(shown, reason)
    try:
        probed = probe(path, limits)
    except UNREADABLE as error:
        return CorruptSample(str(path), f"{type(error).__name__}: {error}")

    aspect_ratio = probed.height / probed.width
    return Entry(path, "", probed.num_frames, probed.height, probed.width, probed.fps, aspect_ratio)
