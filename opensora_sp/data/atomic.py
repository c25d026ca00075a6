"""Files that appear under their names when they are complete."""

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
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
