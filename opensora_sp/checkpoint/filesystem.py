"""Every change that a save makes to the disk goes through one object: the seam where tests put faults."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


class Disk:
    """Writes, flushes, renames and removes.

    ``perform`` is what all of them go through; a test overrides it to kill the process before or after an operation,
    or to raise ``OSError(ENOSPC)`` in place of a write.
    """

    def perform(self, kind: str, path: Path, action: Callable[[], Any]) -> Any:
        """Do ``action``, an operation of ``kind`` "mkdir", "write", "flush", "rename" or "unlink" on ``path``."""
        return action()

    def mkdir(self, path: Path) -> None:
        self.perform("mkdir", path, lambda: path.mkdir(parents=True, exist_ok=True))

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """Write all of ``data`` to an unbuffered file."""

        def write_all() -> None:
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[file.write(rest) :]

        self.perform("write", Path(file.name), write_all)

    def flush(self, path: Path) -> None:
        """Bring a file's content, or a folder's list of names, to the device."""

        def flush() -> None:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        self.perform("flush", path, flush)

    def rename(self, old: Path, new: Path) -> None:
        self.perform("rename", old, lambda: os.replace(old, new))

    def unlink(self, path: Path) -> None:
        self.perform("unlink", path, path.unlink)

    def write_file(self, path: Path, data: bytes) -> None:
        """A small file, whole and flushed, or the one that was there before."""
        partial = path.with_name(f".partial-{path.name}")
        with partial.open("wb", buffering=0) as file:
            self.write(file, data)
        self.flush(partial)
        self.rename(partial, path)
        self.flush(path.parent)

    def remove_tree(self, folder: Path) -> None:
        """Remove a folder and what is in it; links are removed, not followed, and so is ``folder`` if it is one."""
        if folder.is_symlink():
            return self.unlink(folder)
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                self.remove_tree(path)
            else:
                self.unlink(path)
        self.perform("unlink", folder, folder.rmdir)
