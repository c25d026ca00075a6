"""A checkpoint's folder: written under another name, renamed when complete, ``COMMIT`` last; checked before it is read.

Order of a save: files, each flushed; ``manifest.json`` with their sizes and SHA-256; folders flushed; rename;
``COMMIT``, which holds the SHA-256 of the manifest; ``latest``; then older checkpoints go, ``COMMIT`` first. A process
that ends anywhere in between leaves the newest committed checkpoint whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .filesystem import Disk
from .paths import checkpoint_step, committed_checkpoints
from .tensor_file import Spec, TensorFile

FORMAT = 2
logger = logging.getLogger(__name__)


class CheckpointFolder:
    """A checkpoint under way. ``finish`` commits it.

    Args:
        final: the folder that it becomes, ``<run>/step_...``.
        files: content of its small files, by path within the folder.
        keep_last: keep so many of the newest committed checkpoints; None keeps all.
        keep_every: and those whose step is a multiple of this.
    """

    def __init__(
        self,
        final: Path,
        files: Mapping[str, bytes],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.final, self.files, self.disk = final, dict(files), disk or Disk()
        self.keep_last, self.keep_every = keep_last, keep_every
        self.partial = final.parent / f".partial-{final.name}"

    def begin(self) -> None:
        """Make room: remove what saves that were cut off have left."""
        self.disk.mkdir(self.final.parent)
        committed = committed_checkpoints(self.final.parent)
        for path in sorted(self.final.parent.iterdir()):
            leftover = checkpoint_step(path) is not None and path not in committed
            if path.is_dir() and (leftover or path.name.startswith(".partial-")):
                self.disk.remove_tree(path)
        self.disk.mkdir(self.partial)

    def tensor_file(self, name: str, specs: Mapping[str, Spec]) -> TensorFile:
        self.disk.mkdir((self.partial / name).parent)
        return TensorFile(self.disk, self.partial / name, specs)

    def finish(self, entries: Mapping[str, dict[str, Any]]) -> None:
        """Write the small files and the manifest, and commit. ``entries``: size and SHA-256 of the tensor files."""
        manifest = dict(entries)
        for name, data in self.files.items():
            self.disk.mkdir((self.partial / name).parent)
            self._write(self.partial / name, data)
            manifest[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        text = to_json({"format": FORMAT, "step": checkpoint_step(self.final), "files": manifest})
        self._write(self.partial / "manifest.json", text)
        for folder in (*(path for path in self.partial.rglob("*") if path.is_dir()), self.partial):
            self.disk.flush(folder)
        if self.final.exists() or self.final.is_symlink():
            remove_checkpoint(self.final, self.disk)
        self.disk.rename(self.partial, self.final)
        self.disk.flush(self.final.parent)
        self.disk.write_file(self.final / "COMMIT", _commit_text(text))
        self.disk.write_file(self.final.parent / "latest", f"{self.final.name}\n".encode())
        self._remove_old()
        logger.info("saved %s", self.final)

    def abandon(self) -> None:
        """Remove what was written, which may be what has filled the disk."""
        if self.partial.exists():
            self.disk.remove_tree(self.partial)

    def _write(self, path: Path, data: bytes) -> None:
        with path.open("wb", buffering=0) as file:
            self.disk.write(file, data)
        self.disk.flush(path)

    def _remove_old(self) -> None:
        if self.keep_last is None:
            return
        for old in committed_checkpoints(self.final.parent)[: -self.keep_last]:
            step = checkpoint_step(old)
            assert step is not None
            if self.keep_every is None or step % self.keep_every:
                remove_checkpoint(old, self.disk)


def remove_checkpoint(folder: Path, disk: Disk) -> None:
    """Remove a checkpoint, ``COMMIT`` first: what is left of it half-way is not taken for one."""
    if (
        folder / "COMMIT"
    ).exists() and not folder.is_symlink():  # what a link leads to is not this run's to remove
        disk.unlink(folder / "COMMIT")
        disk.flush(folder)
    disk.remove_tree(folder)


def set_aside(folder: Path, disk: Disk | None = None) -> Path:
    """Rename a damaged checkpoint, so that it neither counts as one nor is lost."""
    aside = folder.with_name(f"{folder.name}.damaged")
    disk = disk or Disk()
    if aside.exists():
        disk.remove_tree(aside)
    disk.rename(folder, aside)
    disk.flush(folder.parent)
    return aside


def verify(folder: Path, *, thorough: bool = True, part: str = "") -> None:
    """Check a committed checkpoint against its manifest, and that against ``COMMIT``.

    Args:
        part: check the files within this folder of it only, such as "ema".
        thorough: read all files for their SHA-256; otherwise of files over 1 MiB the size is compared only.

    Raises:
        ValueError: naming the file that is missing, cut short, changed, or listed outside of the folder.
    """
    manifest = _manifest(folder)
    for name, entry in manifest["files"].items():
        if part and PurePosixPath(name).parts[0] != part:
            continue
        file = inside(folder, name)
        found: Any = "no such file"
        if file.is_file():
            found = {"bytes": file.stat().st_size}
            if found["bytes"] == entry["bytes"] and (thorough or entry["bytes"] <= 1 << 20):
                found["sha256"] = sha256(file)
        wanted = {key: entry[key] for key in found} if isinstance(found, dict) else entry
        if found != wanted:
            raise ValueError(
                f"got a damaged checkpoint: {file} has {found}; expected {wanted}; resume from another checkpoint"
            )


def inside(folder: Path, name: str) -> Path:
    """``folder / name``, which must not lead out of the folder, by ``..``, a root or a link."""
    path = PurePosixPath(name)
    file = folder / path
    if (
        path.is_absolute()
        or ".." in path.parts
        or not file.resolve().is_relative_to(folder.resolve())
    ):
        raise ValueError(
            f"got the path {name!r} in the manifest of {folder}; expected one inside this folder; do not use files "
            "from this source"
        )
    return file


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _commit_text(manifest: bytes) -> bytes:
    return f"{FORMAT} {hashlib.sha256(manifest).hexdigest()}\n".encode()


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        text, commit = (folder / "manifest.json").read_bytes(), (folder / "COMMIT").read_bytes()
    except OSError as error:
        raise ValueError(
            f"got a damaged checkpoint: {folder} ({error}); expected manifest.json and COMMIT; resume from another "
            "checkpoint"
        ) from None
    if commit.split(b" ")[0].strip() != str(FORMAT).encode():
        raise ValueError(
            f"got a checkpoint of format {commit[:8]!r} in {folder}; expected format {FORMAT}; read it with the "
            "version that wrote it, or start from its weights"
        )
    if commit != _commit_text(text):
        raise ValueError(
            f"got a damaged checkpoint: {folder / 'manifest.json'} is not the one that COMMIT names; expected the file "
            "as it was written; resume from another checkpoint"
        )
    manifest: dict[str, Any] = json.loads(text)
    if checkpoint_step(folder) not in (None, manifest["step"]):
        raise ValueError(
            f"got a damaged checkpoint: {folder / 'manifest.json'} is of step {manifest['step']}; expected that of the "
            "folder's name; resume from another checkpoint"
        )
    return manifest
