"""Run a reader of foreign files in a fork, and report what it did beside reading them.

Python's audit events show files that are opened, programs, sockets, unpickling, and code that is
executed. What C code does shows from outside: the kernel reports each access to a folder that no
reader has a reason to open (inotify), and a server notes who connects. Memory is that of the fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MEMORY, SECONDS = 256 << 20, 30.0
# More than the budget, so that what exceeds it is measured rather than refused by the kernel.
MEMORY_MARGIN = 512 << 20
# Python with its packages, the project, and what the kernel states.
OWN = (sys.prefix, sys.base_prefix, str(ROOT), "/proc", "/sys", "/dev/null", "/dev/urandom", "/usr")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Audit events of what no reader does, by their beginnings.
NEVER = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostby", "socket.sendto",
    "pickle.find_class",
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate",
    "os.chmod", "os.chown", "shutil.", "tempfile.",
)  # fmt: skip
# From <sys/inotify.h>: opened, read, changed, made, deleted or moved.
ANY_ACCESS = 0x20 | 0x1 | 0x2 | 0x4 | 0x100 | 0x200 | 0x400 | 0xC0


@dataclass
class Report:
    """What a reader did.

    Args:
        result: "returned", or the type and text of its error, or how its process ended.
        kinds: the classes of the error.
        forbidden: what it did that no reader may do.
        peak: bytes of memory beyond those of the process that was forked.
    """

    result: str
    kinds: list[str] = field(default_factory=list)
    forbidden: list[str] = field(default_factory=list)
    peak: int = 0


class Outside:
    """A folder that nobody may touch, and a server that nobody may reach."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.secret = folder / "secret"
        self.secret.write_text('{"secret": "of the user"}')
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.url = f"http://127.0.0.1:{self.server.getsockname()[1]}/secret"

    @contextmanager
    def watched(self, forbidden: list[str]) -> Iterator[None]:
        """Append accesses within the context to a list."""
        libc = ctypes.CDLL(None, use_errno=True)
        watch = libc.inotify_init1(os.O_NONBLOCK)
        mask = ctypes.c_uint32(ANY_ACCESS)
        assert libc.inotify_add_watch(watch, os.fsencode(self.folder), mask) >= 0
        try:
            yield
            if select.select([watch], [], [], 0)[0]:
                names = re.findall(rb"[\w.-]{3,}", os.read(watch, 4096))
                forbidden.append(f"touched {self.folder}: {names}")
            if select.select([self.server], [], [], 0)[0]:
                self.server.accept()[0].close()
                forbidden.append(f"connected to {self.url}")
        finally:
            os.close(watch)

    def close(self) -> None:
        self.server.close()


def run_guarded(
    read: Callable[[], Any], folder: Path, outside: Outside, *, seconds: float = SECONDS
) -> Report:
    """Call ``read`` in a fork, which may read the files of ``folder`` and nothing else.

    Temporary files may be written into the folder ``scratch`` beside it.
    """
    read_end, write_end = os.pipe()
    forbidden: list[str] = []
    with outside.watched(forbidden):
        child = os.fork()
        if child == 0:
            _in_child(read, folder, write_end)
        os.close(write_end)
        data = _read_until(read_end, time.monotonic() + seconds)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)

    if data is None:
        return Report("hung", [], [*forbidden, f"it did not end within {seconds:g} s"])
    if not data:
        return Report(f"died ({status})", [], [*forbidden, f"its process died ({status})"])
    report = Report(**json.loads(data))
    report.forbidden += forbidden
    return report


def _read_until(pipe: int, deadline: float) -> bytes | None:
    """All that is written to a pipe; None if it is not closed in time."""
    parts = []
    with os.fdopen(pipe, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            parts.append(file.read(1 << 16))
            if not parts[-1]:
                return b"".join(parts)
    return None


def _in_child(read: Callable[[], Any], folder: Path, pipe: int) -> None:
    report = Report("returned")
    try:
        os.chdir(folder)
        tempfile.tempdir = str(folder.parent / "scratch")
        Path(tempfile.tempdir).mkdir(exist_ok=True)
        sys.dont_write_bytecode = True
        Path("/proc/self/clear_refs").write_text("5")
        before, data = _status("VmHWM"), _status("VmData")
        limit = data + MEMORY + MEMORY_MARGIN
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        _watch_events(folder, report.forbidden)
        try:
            read()
        except BaseException as error:
            report.result = f"{type(error).__name__}: {error}"
            report.kinds = [kind.__name__ for kind in type(error).__mro__]
            if isinstance(error, MemoryError):
                report.forbidden.append("it ran out of memory")
        report.peak = _status("VmHWM") - before
        os.write(pipe, json.dumps(vars(report)).encode()[: 1 << 20])
    finally:
        os._exit(0)


def _status(name: str) -> int:
    """A number of bytes in the kernel's description of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) << 10


def _watch_events(folder: Path, forbidden: list[str]) -> None:
    inside, scratch = (str(folder), str(folder.resolve())), str(tempfile.tempdir)

    def note(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, bytes)) and path:
                _note_open(os.path.realpath(os.fsdecode(path)), flags or 0)
        elif event == "subprocess.Popen":
            forbidden.append(f"started {arguments[1]}")
        elif event == "exec":
            name = getattr(arguments[0], "co_filename", "")
            if name.startswith("/") and not name.startswith(OWN):
                forbidden.append(f"executed {name}")
        elif event.startswith(NEVER) and not path_of(arguments).startswith(scratch):
            forbidden.append(f"{event} {arguments!r:.200}")

    def path_of(arguments: tuple) -> str:
        """The path that an event is about; some are relative to an open folder."""
        path, folder = arguments[0], arguments[-1]
        if isinstance(folder, int) and folder >= 0 and not os.path.isabs(str(path)):
            return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        return str(path)

    def _note_open(path: str, flags: int) -> None:
        if path.startswith(scratch):
            return
        if flags & WRITES and path != os.devnull:
            forbidden.append(f"opened {path} to write")
        elif not path.startswith((*inside, *OWN)):
            forbidden.append(f"opened {path}")

    sys.addaudithook(note)
