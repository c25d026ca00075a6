"""The error file by which a failing rank gives ``torchrun`` its reason, written once per host.

``torch.distributed.elastic.multiprocessing.errors.record`` writes that file too. It is not used,
since torchrun prints the traceback that it stores instead of the message, and since every rank that
fails writes one: a mistake in a config would be reported as many times as a host has ranks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

EXIT_TIMEOUT = 20.0  # seconds that a rank waits for the first failing rank of its host to exit


def write_error_file(reason: str) -> bool:
    """Store the reason of a failure for torchrun; returns whether this rank is the first to fail.

    The last lines of torchrun are the reason with the earliest timestamp. Above them it lists the
    other ranks: these leave their reason out, which is mostly the same. Without torchrun, every
    process counts as the first.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return True

    marker = _marker(file)
    is_first = marker is None or _claim(marker)

    # A file that cannot be written must not replace the reason by another error.
    with suppress(OSError):
        if not os.path.exists(file):
            timestamp = int(time.time()) + (not is_first)
            # As torch writes it, but for the stack: only so is the exit status added quietly.
            message = {"message": reason, "extraInfo": {"timestamp": str(timestamp)}}
            content = {"message": message if is_first else "", "timestamp": timestamp}
            Path(file).write_text(json.dumps(content))
    return is_first


def wait_for_first_failure() -> None:
    """Wait until the first failing rank of this host has exited.

    torchrun then ends the others by SIGTERM, and reports that failure alone.
    """
    marker = _marker(os.environ["TORCHELASTIC_ERROR_FILE"])
    pid = "" if marker is None else _read_pid(marker)

    wait_until(lambda: not _is_running(pid), EXIT_TIMEOUT)
    # SIGTERM from the launcher arrives meanwhile.
    time.sleep(0.5)


def _marker(file: str) -> Path | None:
    """The link to the first failing rank's process number, in torchrun's folder of the attempt.

    Only torchrun makes a folder for each attempt, and in it one for each rank. In any other folder
    the link would outlive the run, so there is none.
    """
    folder = Path(file).parent.parent
    return folder / "first_to_fail" if folder.name.startswith("attempt_") else None


def _claim(marker: Path) -> bool:
    """Create the link unless it exists; returns whether this process did, or no process can."""
    pid = str(os.getpid())
    try:
        # A link, not a file: it has its content from the moment on at which others can see it.
        os.symlink(pid, marker)
        return True
    except FileExistsError:
        return _read_pid(marker) in (pid, "")
    except OSError:
        return True


def _read_pid(marker: Path) -> str:
    """The process number that the link holds; empty if it cannot be read."""
    try:
        return os.readlink(marker)
    except OSError:
        return ""


def _is_running(pid: str) -> bool:
    """True if a process has not exited; a busy launcher may leave it as a zombie for a while."""
    try:
        return bool(psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError):
        return False


def wait_until(condition: Callable[[], bool], timeout: float, interval: float = 0.05) -> bool:
    """Poll every ``interval`` seconds until a condition holds; False if ``timeout`` passes."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
