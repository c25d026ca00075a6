"""Opening of files whose paths come from outside: only regular files, and without waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any


def open_regular(path: str | Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """Like ``open(path, mode, **options)`` to read, for regular files only.

    A plain ``open`` of a named pipe waits until another process opens it to write.

    Raises:
        OSError: if the file cannot be opened, or is a named pipe, a device, a socket or a folder.
    """
    return open(path, mode, opener=_open_regular, **options)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    # Of what was opened, not of the path: that may name something else by now.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a named pipe, a device or a folder, not a file", path)

    os.set_blocking(descriptor, True)
    return descriptor
