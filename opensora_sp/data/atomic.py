"""Files that appear under their names when they are complete, and folders for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield the partial path to write to. It replaces ``path`` on success and is removed on error.

    Partial files are hidden and keep the suffix, which decides on formats.
    """
    # By process, so that two of them do not write one file.
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def check_writable(folder: Path, name: str = "outputs") -> None:
    """Raise ValueError if files cannot be written in a folder, which need not exist yet.

    Args:
        name: of the option that sets the folder, for errors.
    """
    existing = folder.absolute()
    # A link that leads nowhere exists as well: no folder can be made in its place.
    while not os.path.lexists(existing):
        existing = existing.parent
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ValueError(
            f"got {name} {str(folder)!r}, but {existing} is no folder that can be written; "
            f"expected one; set {name} to another folder"
        )
