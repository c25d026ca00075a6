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


def end_with_launchers() -> None:
    """End this process when its launcher exits, except while it handles SIGTERM itself.

    For the first line of a script: nothing that it imports or waits for can delay this. Does
    nothing without ``torchrun`` or ``colossalai run``. ``Watchdog`` handles SIGTERM, and then
    decides on the end itself.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
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
        is_handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        waited = 0.0 if is_handled else waited + INTERVAL

    with suppress(OSError):  # its terminal may be gone as well
        sys.stderr.write(f"rank {os.environ.get('RANK')} ends: its launcher has exited\n")
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

    ``torchrun`` is the nearest ancestor that runs Python: between them may be a shell script.
    ``colossalai run`` (0.5.0) is the parent of a copy of itself for each node, which starts
    ``torchrun`` there. It ends alone and leaves the others running, so the process that the user
    started is returned. None stands for one that has exited already. Other ancestors are not
    watched: a shell may end while what it started keeps running.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []

    ancestors = _ancestors()
    torchrun = next(filter(_runs_python, ancestors), None)
    colossalai: list[psutil.Process | None] = [one for one in ancestors if _is_colossalai(one)]
    if len(colossalai) == 1:  # the copy
        colossalai.append(None)
    return [torchrun, *colossalai[-1:]]


def _ancestors() -> list[psutil.Process]:
    """The parent of this process, its parent, and so on, up to one that has exited."""
    ancestors = []
    with suppress(psutil.Error):
        process = psutil.Process().parent()
        while process is not None:
            ancestors.append(process)
            process = process.parent()
    return ancestors


def _runs_python(process: psutil.Process) -> bool:
    """Whether its program is a Python interpreter, whatever title the process has set."""
    with suppress(psutil.Error):
        try:
            program = process.exe()
        except psutil.AccessDenied:  # of another user
            program = process.cmdline()[0]
        return Path(program).name.startswith("python")
    return False


def _is_colossalai(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "run" in command and any(Path(part).name == "colossalai" for part in command[:2])
