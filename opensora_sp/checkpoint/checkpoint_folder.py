"""A checkpoint's folder: written under a partial name, renamed when complete, verified.

Order of a save: files, each flushed; ``manifest.json`` with their sizes and SHA-256; folders
flushed; rename; ``COMMIT``, which holds the SHA-256 of the manifest; ``latest``; removal of older
checkpoints, ``COMMIT`` first. A process may end anywhere in between: the newest committed
checkpoint stays complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from opensora_sp.common.files import MAX_BYTES, parse_json, read_small_file

from .filesystem import FileSystem, sha256
from .paths import checkpoint_step, committed_checkpoints, is_committed
from .tensor_file import Spec, TensorFile

# Grows with what is read: a checkpoint of another format is refused.
FORMAT = 3
# Larger files are compared by size only, unless a check is thorough.
QUICK_CHECK_BYTES = 1 << 20
# A number and 64 digits.
MAX_COMMIT_BYTES = 1 << 10
logger = logging.getLogger(__name__)


class DamagedCheckpointError(ValueError):
    """Files of a checkpoint do not have the digests of its manifest."""

    def __init__(self, damage: str, expected: str = "the file as it was written") -> None:
        super().__init__(
            f"got a damaged checkpoint: {damage}; expected {expected}; copy it again, or take "
            "another checkpoint"
        )


class CheckpointFolder:
    """A checkpoint being written: ``begin``, then tensor files, then ``finish``, which commits it.

    Args:
        final: the folder that it becomes, ``<run>/step_...``.
        files: content of its small files, by path within the folder.
        keep_last: number of the newest committed checkpoints to keep; None keeps all.
        keep_every: keep also those whose step is a multiple of this.
    """

    def __init__(
        self,
        final: Path,
        files: Mapping[str, bytes],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        filesystem: FileSystem | None = None,
    ) -> None:
        self.final, self.files = final, dict(files)
        self.keep_last, self.keep_every = keep_last, keep_every
        self.filesystem = filesystem or FileSystem()
        self.partial = final.parent / f".partial-{final.name}"

    def begin(self) -> None:
        """Create the partial folder; remove what interrupted saves have left."""
        run_dir = self.final.parent
        self.filesystem.mkdir(run_dir)

        committed = committed_checkpoints(run_dir)
        for path in sorted(run_dir.iterdir()):
            # Removed at the next save rather than at the start: a start that fails changes nothing.
            uncommitted = checkpoint_step(path) is not None and path not in committed
            if path.is_dir() and (uncommitted or path.name.startswith(".partial-")):
                self.filesystem.remove_tree(path)

        self.filesystem.mkdir(self.partial)

    def tensor_file(self, name: str, specs: Mapping[str, Spec]) -> TensorFile:
        path = self.partial / name
        self.filesystem.mkdir(path.parent)
        return TensorFile(self.filesystem, path, specs)

    def finish(self, entries: Mapping[str, dict[str, Any]]) -> None:
        """Write the small files and the manifest, and commit.

        Args:
            entries: size and SHA-256 of each tensor file.
        """
        manifest = self._write_files(entries)

        self._vacate()
        self.filesystem.rename(self.partial, self.final)
        self.filesystem.flush(self.final.parent)

        self.filesystem.write_file(self.final / "COMMIT", _commit_text(manifest))
        # After COMMIT: this file shows that a checkpoint was committed, also when it is gone.
        self.filesystem.write_file(self.final.parent / "latest", f"{self.final.name}\n".encode())
        self._remove_old()
        logger.info("saved %s", self.final)

    def abandon(self) -> None:
        """Remove what was written, which may be what has filled the disk."""
        if self.partial.exists():
            self.filesystem.remove_tree(self.partial)

    def _write_files(self, entries: Mapping[str, dict[str, Any]]) -> bytes:
        """Write and flush everything but ``COMMIT``; returns the manifest."""
        listed = dict(entries)
        for name, content in self.files.items():
            self.filesystem.mkdir((self.partial / name).parent)
            self.filesystem.write_flushed(self.partial / name, content)
            listed[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

        manifest = to_json({"format": FORMAT, "step": checkpoint_step(self.final), "files": listed})
        self.filesystem.write_flushed(self.partial / "manifest.json", manifest)

        folders = [path for path in self.partial.rglob("*") if path.is_dir()]
        # A file whose name is not flushed may be gone after a power failure.
        for folder in (*folders, self.partial):
            self.filesystem.flush(folder)
        return manifest

    def _vacate(self) -> None:
        """Remove what has the name of this checkpoint; a committed checkpoint is only renamed.

        A run resumes before a committed checkpoint where it could not read that one.
        """
        if is_committed(self.final) or self.final.is_file():
            aside = set_aside(self.final, "previous", self.filesystem)
            logger.warning("%s was there before this save; kept as %s", self.final, aside.name)
        elif os.path.lexists(self.final):
            remove_checkpoint(self.final, self.filesystem)

    def _remove_old(self) -> None:
        """Remove all but the newest checkpoints, among those up to this one that can be read."""
        if self.keep_last is None:
            return

        steps = {}
        for folder in committed_checkpoints(self.final.parent):
            with suppress(ValueError):
                # One that cannot be read does not count, so it never makes a good one surplus.
                steps[folder] = _read_manifest(folder)["step"]

        newest = checkpoint_step(self.final)
        # Later ones were passed over by this run, and may be wanted by whoever looks why.
        candidates = [folder for folder, step in steps.items() if step <= newest]
        for old in candidates[: -self.keep_last]:
            if self.keep_every is None or steps[old] % self.keep_every:
                remove_checkpoint(old, self.filesystem)


def remove_checkpoint(folder: Path, filesystem: FileSystem) -> None:
    """Remove a checkpoint, ``COMMIT`` first: what an interrupted removal leaves is none."""
    # The target of a link is not this run's to remove.
    if not folder.is_symlink() and (folder / "COMMIT").exists():
        filesystem.unlink(folder / "COMMIT")
        filesystem.flush(folder)

    filesystem.remove_tree(folder)


def set_aside(folder: Path, suffix: str = "damaged", filesystem: FileSystem | None = None) -> Path:
    """Rename a checkpoint to ``<name>.<suffix>``, which is kept but never read.

    A number follows where this name is taken: nothing is replaced.
    """
    filesystem = filesystem or FileSystem()
    aside, number = folder.with_name(f"{folder.name}.{suffix}"), 2
    while os.path.lexists(aside):
        aside = folder.with_name(f"{folder.name}.{suffix}-{number}")
        number += 1

    filesystem.rename(folder, aside)
    filesystem.flush(folder.parent)
    return aside


def verify(folder: Path, *, thorough: bool = True, part: str = "") -> None:
    """Check a committed checkpoint against its manifest, and the manifest against ``COMMIT``.

    Args:
        thorough: compare the SHA-256 of all files; otherwise only the size of files over 1 MiB.
        part: check only the files within this folder of the checkpoint, such as "ema".

    Raises:
        DamagedCheckpointError: a ValueError that names the file that is missing, truncated or
            changed.
        ValueError: naming the file that is outside the folder or cannot be read now; or if the
            format is one that this version does not read.
    """
    for name, entry in _read_manifest(folder)["files"].items():
        if part and PurePosixPath(name).parts[0] != part:
            continue

        file = resolve_inside(folder, name)
        with reading(file):
            difference = _difference(file, entry, thorough=thorough)
        if difference:
            actual, expected = difference
            raise DamagedCheckpointError(f"{file} {actual}", f"{expected}, as it was written")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the error of a disk or of permissions, which may not last, into one for users."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(f"{path} ({error.strerror})") from None
    except OSError as error:
        raise ValueError(
            f"got {path}, which cannot be read now ({error.strerror}); expected a file of a "
            "checkpoint; check the disk and the permissions, then start again; it is left as it is"
        ) from None


def _difference(file: Path, entry: dict[str, Any], *, thorough: bool) -> tuple[str, str] | None:
    """A file's size or digest, and the expected one of the manifest; None if these agree."""
    if not file.is_file():
        return "is missing", f"{entry['bytes']} bytes"

    size = file.stat().st_size
    if size != entry["bytes"]:
        return f"has {size} bytes", f"{entry['bytes']} bytes"

    if thorough or size <= QUICK_CHECK_BYTES:
        digest = sha256(file)
        if digest != entry["sha256"]:
            return f"has the SHA-256 {digest}", entry["sha256"]
    return None


def resolve_inside(folder: Path, name: str) -> Path:
    """``folder / name``.

    Raises:
        ValueError: if that leads out of the folder by ``..``, an absolute path or a link.
    """
    path = PurePosixPath(name)
    file = folder / path
    is_relative = not path.is_absolute() and ".." not in path.parts
    try:
        # Unlike Path.resolve, this does not raise at links in a circle.
        stays = Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))
    except ValueError:
        # No file can have this name.
        stays = False
    if not is_relative or not stays:
        raise ValueError(
            f"got the path {name!r} of the checkpoint {folder}; expected one inside this folder; "
            "do not use files from this source"
        )
    return file


def to_json(content: Any) -> bytes:
    """Indented JSON with sorted keys."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _commit_text(manifest: bytes) -> bytes:
    return f"{FORMAT} {hashlib.sha256(manifest).hexdigest()}\n".encode()


def _read_manifest(folder: Path) -> dict[str, Any]:
    commit = read_commit(folder)
    _check_format(commit, folder)
    path = folder / "manifest.json"
    text = _read_bounded(folder, path.name, MAX_BYTES)
    # So that COMMIT covers the manifest, and by its digests all files.
    if commit != _commit_text(text):
        raise DamagedCheckpointError(f"{path} is not the one that COMMIT names")

    manifest: dict[str, Any] = parse_json(text, str(path))
    if not _is_manifest(manifest):
        raise ValueError(
            f"got {path}, which is no list of a checkpoint's files; expected its step, and the "
            "size and SHA-256 of each; do not use files from this source"
        )
    if checkpoint_step(folder) not in (None, manifest["step"]):
        raise ValueError(
            f"got a renamed checkpoint: {path} is of step {manifest['step']}; expected the step of "
            "the folder's name; rename the folder back, or take another checkpoint"
        )
    return manifest


def _is_manifest(content: Any) -> bool:
    """True if JSON has the structure of a manifest: whoever makes one can commit it as well."""
    try:
        types = {
            (type(entry["bytes"]), type(entry["sha256"])) for entry in content["files"].values()
        }
        return type(content["step"]) is int and types <= {(int, str)}
    except (AttributeError, KeyError, TypeError):
        return False


def _read_bounded(folder: Path, name: str, max_bytes: int) -> bytes:
    """A small file; a larger one than this package writes is damaged, and not read."""
    path = resolve_inside(folder, name)
    with reading(path):
        try:
            return read_small_file(path, max_bytes, "a file of a checkpoint")
        except ValueError:
            raise DamagedCheckpointError(f"{path} of more than {max_bytes:,} bytes") from None


def read_commit(folder: Path) -> bytes:
    """The content of ``COMMIT``; errors as of ``verify``."""
    return _read_bounded(folder, "COMMIT", MAX_COMMIT_BYTES)


def _check_format(commit: bytes, folder: Path) -> None:
    """Raise ValueError unless the content of ``COMMIT`` begins with the format that is read."""
    match = re.match(rb"(\d{1,9})\s", commit)
    if match is None:
        raise DamagedCheckpointError(
            f"{folder / 'COMMIT'} holds {commit[:80]!r}", "a format and a SHA-256"
        )
    if int(match[1]) != FORMAT:
        raise ValueError(
            f"got a checkpoint of format {int(match[1])} in {folder}; expected {FORMAT}; read it "
            "with the version that wrote it; it is left as it is"
        )
