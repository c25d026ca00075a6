"""The launchers of this process: which they are, and how it ends with them.

``torchrun`` ends its ranks when it is asked to end. Where it is killed, or ``colossalai run``
exits, they keep running, and hold GPUs and ports. A ``Watchdog`` stops a training that has started,
with a checkpoint. Until there is one, and after it, the ranks of a script end by themselves.

Imports nothing slow: scripts call ``end_with_launchers`` first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

INTERVAL = 1.0  # seconds between two looks at the launchers
EXIT_TIMEOUT = 5.0  # seconds that a process has to end by itself after they have exited
PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2  # of prctl(2)
RUN_ID = "TORCHELASTIC_RUN_ID"  # which torchrun sets for its ranks

# Set while the exit of a launcher is a request to stop, by ``runtime.signals.SignalHandler``.
is_request_to_stop = threading.Event()


def end_with_launchers() -> None:
    """End this process when its launcher exits, except while a ``Watchdog`` decides on that.

    For the first line of a script: nothing that it imports or waits for can delay this. Does
    nothing without ``torchrun`` or ``colossalai run``.
    """
    if RUN_ID not in os.environ:
        return
    # The kernel watches the parent, which may be torchrun.
    set_parent_death_signal(signal.SIGKILL)

    # It had no effect if the parent had exited before, and does not reach further ancestors.
    watched = launchers()
    threading.Thread(target=_end_with, args=(watched,), name="launchers", daemon=True).start()


def _end_with(watched: list[psutil.Process | None]) -> None:
    while all(map(is_alive, watched)):
        time.sleep(INTERVAL)

    waited = 0.0
    while waited < EXIT_TIMEOUT:
        time.sleep(INTERVAL)
        waited = 0.0 if is_request_to_stop.is_set() else waited + INTERVAL

    name = f"rank {os.environ['RANK']}" if "RANK" in os.environ else f"process {os.getpid()}"
    with suppress(OSError):  # its terminal may be gone as well
        sys.stderr.write(f"{name} ends: its launcher has exited\n")
        sys.stderr.flush()
    os._exit(1)


def set_parent_death_signal(number: int) -> int:
    """Let the kernel send this process a signal when its parent exits; returns the former one.

    0 is no signal. For the main thread of a process; Linux only, elsewhere it does nothing.
    """
    if sys.platform != "linux":
        return 0
    kernel, former = ctypes.CDLL(None, use_errno=True), ctypes.c_int(0)
    kernel.prctl(PR_GET_PDEATHSIG, ctypes.byref(former), 0, 0, 0)
    kernel.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return former.value


def is_alive(process: psutil.Process | None) -> bool:
    """Whether a process still runs; one that has exited may remain as a zombie."""
    try:
        return bool(
            process is not None
            and process.is_running()
            and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        )
    except psutil.Error:
        return False


def launchers() -> list[psutil.Process | None]:
    """The ``torchrun`` that started this process and, if there is one, its ``colossalai run``.

    ``torchrun`` is the nearest ancestor that runs Python: between them may be a shell script. Where
    none does, it is a frozen executable, out of sight in an outer PID namespace, or has exited
    (``_torchrun``).
    ``colossalai run`` (0.5.0) is the parent of a copy of itself for each node, which starts
    ``torchrun`` there. It ends alone and leaves the others running, so the process that the user
    started is returned. None stands for one that has exited already. Other ancestors are not
    watched: a shell may end while what it started keeps running.
    """
    if RUN_ID not in os.environ:
        return []

    ancestors = _ancestors()
    colossalai: list[psutil.Process | None] = [one for one in ancestors if _is_colossalai(one)]
    if len(colossalai) == 1:  # the copy
        colossalai.append(None)
    return [*_torchrun(ancestors), *colossalai[-1:]]


def _torchrun(ancestors: list[psutil.Process]) -> list[psutil.Process | None]:
    """The process to watch as ``torchrun``; [None] where it has exited, [] where it is unknown.

    Ranks and their wrappers have ``RUN_ID`` in their environments, and ``torchrun`` has not. Once
    it has exited, a process that adopts orphans is in its place. A script that a shell has started
    with a copy of these variables counts as a rank if that shell has exited already.
    """
    for process in ancestors:
        if _runs_python(process):
            return [process]

    for process in ancestors:
        if not _has_run_id(process):
            return [None if _adopts_orphans(process) else process]

    # Only wrappers are left. The first process of a PID namespace has no parent in it; where the
    # last one has a parent, that has exited, or /proc hides it as a process of another user.
    if not _has_no_parent(ancestors):
        return [None]
    return [process for process in ancestors[:1] if process.pid != 1]


def _own_process() -> psutil.Process:
    """This process by its number in /proc, which may be that of an outer PID namespace."""
    try:
        return psutil.Process(int(os.readlink("/proc/self")))
    except OSError:  # no Linux
        return psutil.Process()


def _ancestors() -> list[psutil.Process]:
    """The parent of this process, its parent, and so on, up to one that has exited."""
    ancestors = []
    with suppress(psutil.Error):
        process = _own_process().parent()
        while process is not None:
            ancestors.append(process)
            process = process.parent()
    return ancestors


def _runs_python(process: psutil.Process) -> bool:
    """Whether its program is a Python interpreter, whatever title the process has set."""
    with suppress(psutil.Error, IndexError):
        try:
            program = process.exe()
        except psutil.AccessDenied:  # of another user
            program = process.cmdline()[0]
        # The executable of a framework build on macOS is ``Python``.
        return Path(program).name.lower().startswith("python")
    return False


def _has_run_id(process: psutil.Process) -> bool:
    with suppress(psutil.Error, OSError):
        return RUN_ID in process.environ()
    return False


def _adopts_orphans(process: psutil.Process) -> bool:
    """Whether it is the first process, or the systemd of a user."""
    with suppress(psutil.Error):
        return bool(process.pid == 1 or process.name() == "systemd")
    return False


def _has_no_parent(ancestors: list[psutil.Process]) -> bool:
    """Whether the outermost of these, or this process without any, is the first process."""
    with suppress(psutil.Error):
        outermost = ancestors[-1] if ancestors else _own_process()
        return bool(outermost.ppid() == 0)
    return False


def _is_colossalai(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "run" in command and any(Path(part).name == "colossalai" for part in command[:2])
