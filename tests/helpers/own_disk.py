"""A small disk of one test: a tmpfs in mounts of its own, which end with the test's processes."""

from __future__ import annotations

import ctypes
import os
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ranks import warm_context

CLONE_NEWNS = 0x20000  # of unshare(2); the others of mount(2) and umount2(2)
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1, 32, 4096, 16384, 1 << 18, 2
FILLER = "filler"


def with_own_disk(
    folder: Path, megabytes: float, function: Callable[..., Any], *args: Any, timeout: float = 240
) -> Any:
    """``function(*args)`` of a process that sees a disk of this size at ``folder``.

    Raises:
        AssertionError: as the function does.
        PermissionError: if no disk can be mounted.
    """
    folder.mkdir(parents=True)
    context = warm_context()
    ours, theirs = context.Pipe(duplex=False)
    work = pickle.dumps((function, args))
    process = context.Process(target=_run, args=(folder, megabytes, work, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(timeout), "the test's process hangs"
        error, value = ours.recv()
    except EOFError:
        process.join()
        error, value = f"died with exit code {process.exitcode}", None
    finally:
        process.kill()
    if error == PermissionError.__name__:
        raise PermissionError("no tmpfs can be mounted")
    assert error is None, error
    return value


def _run(folder: Path, megabytes: float, work: bytes, pipe: Connection) -> None:
    try:
        mount_disk(folder, megabytes)
        function, args = pickle.loads(work)
        outcome = (None, function(*args))
    except PermissionError:
        outcome = (PermissionError.__name__, None)
    except BaseException:
        outcome = (traceback.format_exc(), None)
    pipe.send(outcome)


def mount_disk(folder: Path, megabytes: float) -> None:
    _call("unshare", CLONE_NEWNS)
    _mount("none", Path("/"), MS_REC | MS_PRIVATE)
    _mount("tmpfs", folder, 0, "tmpfs", f"size={round(megabytes * 1024)}k")


def make_read_only(folder: Path) -> None:
    """What has been opened stays writable."""
    _mount(str(folder), folder, MS_BIND)
    _mount("none", folder, MS_BIND | MS_REMOUNT | MS_RDONLY)


def make_writable(folder: Path) -> None:
    _call("umount2", os.fsencode(folder), MNT_DETACH)


def fill(disk: Path) -> None:
    """Leave no byte on a disk."""
    with (disk / FILLER).open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass


def make_room(disk: Path) -> None:
    (disk / FILLER).unlink()


def _mount(source: str, target: Path, flags: int, kind: str = "", data: str = "") -> None:
    texts = [os.fsencode(text) if text else None for text in (source, str(target), kind)]
    _call("mount", *texts, flags, os.fsencode(data) or None)


def _call(name: str, *arguments: Any) -> None:
    kernel = ctypes.CDLL(None, use_errno=True)
    if getattr(kernel, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
