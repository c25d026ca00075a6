"""The file-system interface of saves. Tests replace it to inject faults.

A file of a checkpoint is durable when its content and the name in its folder are flushed (fsync).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from opensora_sp.common.files import open_regular


class FileSystem:
    """Creates, writes, flushes, renames and removes files and folders.

    Every operation goes through ``perform``. A test overrides that method to kill the process
    before or after an operation, or to raise ``OSError(ENOSPC)`` in place of a write.
    """

    def perform(self, kind: str, path: Path, action: Callable[[], Any]) -> Any:
        """Run ``action``, an operation on ``path``, which errors such as a full disk's then name.

        Args:
            kind: "mkdir", "write", "flush", "rename" or "unlink".
        """
        try:
            return action()
        except OSError as error:
            # Errors of write and fsync name no file.
            error.filename = error.filename or str(path)
            raise

    def mkdir(self, path: Path) -> None:
        self.perform("mkdir", path, lambda: path.mkdir(parents=True, exist_ok=True))

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        """Write all of ``content`` to an unbuffered file."""

        def write_all() -> None:
            rest = memoryview(content).cast("B")
            while rest:
                # An unbuffered write may take a part, as when the disk becomes full.
                rest = rest[file.write(rest) :]

        self.perform("write", Path(file.name), write_all)

    def flush(self, path: Path) -> None:
        """Flush a file's content, or a folder's list of names, to the storage device (fsync)."""

        def sync() -> None:
            # A folder can be opened for reading alone, which suffices for fsync.
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        self.perform("flush", path, sync)

    def rename(self, old: Path, new: Path) -> None:
        self.perform("rename", old, lambda: os.replace(old, new))

    def unlink(self, path: Path) -> None:
        self.perform("unlink", path, path.unlink)

    def write_flushed(self, path: Path, content: bytes) -> None:
        """Write a small file and flush its content."""
        with path.open("wb", buffering=0) as file:
            self.write(file, content)

        self.flush(path)

    def write_file(self, path: Path, content: bytes) -> None:
        """Replace a small file atomically: a reader sees the old content or all of the new."""
        partial = path.with_name(f".partial-{path.name}")
        self.write_flushed(partial, content)

        self.rename(partial, path)
        self.flush(path.parent)

    def remove_tree(self, folder: Path) -> None:
        """Remove a folder with its content. Symbolic links are removed, not followed."""
        if folder.is_symlink():
            return self.unlink(folder)

        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                self.remove_tree(path)
            else:
                self.unlink(path)

        self.perform("unlink", folder, folder.rmdir)


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with open_regular(path) as file:
        # IO declares no readinto, which files have.
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
