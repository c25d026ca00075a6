"""Faults of the disk under a run's folder, which begin and end while it trains.

They are switched by files beside the folder, so that any rank can switch them for all.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import av
from own_disk import fill, make_read_only, make_room, make_writable

SLOW_FSYNC = 0.15  # seconds


def begin(kind: str, run_dir: Path) -> None:
    """Let the fault begin: "full", "read-only", "EIO", "slow fsync", "removed" or "moved"."""
    if kind == "full":
        fill(run_dir.parent)
    elif kind == "read-only":
        make_read_only(run_dir)
    elif kind == "removed":
        shutil.rmtree(run_dir, ignore_errors=True)
    elif kind == "moved":
        run_dir.rename(run_dir.with_name("moved"))
    else:
        run_dir.with_name(kind).touch()


def end(kind: str, run_dir: Path) -> None:
    """Mend the disk; what was removed or moved stays so."""
    if kind == "full":
        make_room(run_dir.parent)
    elif kind == "read-only":
        make_writable(run_dir)
    elif kind not in ("removed", "moved"):
        run_dir.with_name(kind).unlink()


def plant_switches(run_dir: Path) -> None:
    """For each rank: EIO of whatever changes the folder, and fsync that takes long."""
    slow, broken = run_dir.with_name("slow fsync"), run_dir.with_name("EIO")

    def is_in_run(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(run_dir)

    def failing(plain: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        @wraps(plain)
        def call(path: Any, *args: Any, **how: Any) -> Any:
            if is_in_run(path) and broken.exists() and writes(*args, **how):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return plain(path, *args, **how)

        return call

    def opens_to_write(mode: str = "r", *args: Any, **how: Any) -> bool:
        return not mode.startswith("r") or "+" in mode

    def fsync(descriptor: int) -> None:
        if slow.exists():
            time.sleep(SLOW_FSYNC)
        if broken.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        plain_fsync(descriptor)

    plain_fsync, os.fsync = os.fsync, fsync
    io.open = builtins.open = failing(io.open, opens_to_write)
    av.open = failing(av.open, opens_to_write)
    for name in ("replace", "rename", "link", "mkdir", "unlink", "rmdir"):
        setattr(os, name, failing(getattr(os, name), lambda *args, **how: True))
