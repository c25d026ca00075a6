"""Processes of this host: a rank's launchers, how it ends with them, its signals and workers.

``torchrun`` ends its ranks when it is asked to end. Where it is killed, or ``colossalai run``
exits, they keep running, and hold GPUs and ports. A ``Watchdog`` stops a training that has started,
with a checkpoint. Until there is one, and after it, the ranks of a script end by themselves.

Imports nothing slow: scripts call ``end_with_launchers`` first.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from opensora_sp.common.console import INTERRUPTED

INTERVAL = 1.0  # seconds between two looks at the launchers
EXIT_TIMEOUT = 5.0  # seconds that a process has to end by itself after they have exited
PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2  # of prctl(2)
RUN_ID = "TORCHELASTIC_RUN_ID"  # which torchrun sets for its ranks

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A terminal and a launcher that forwards SIGINT send it twice, within so many seconds.
SAME_INTERRUPT = 1.0

# Set while the exit of a launcher is a request to stop, by ``SignalHandler``.
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


def _end_with(watched: list[psutil.Process]) -> None:
    is_orphan = bool(watched) and _adopts_orphans(watched[0])
    while not is_orphan and all(map(is_alive, watched)):
        time.sleep(INTERVAL)

    waited = 0.0
    while waited < EXIT_TIMEOUT:
        time.sleep(INTERVAL)
        # While a watchdog runs, it decides, and the time begins when it has left.
        waited = 0.0 if is_request_to_stop.is_set() else waited + INTERVAL

    name = f"rank {os.environ['RANK']}" if "RANK" in os.environ else f"process {os.getpid()}"
    with suppress(OSError):
        # Its terminal may be gone as well.
        sys.stderr.write(f"{name} ends: its launcher has exited\n")
        sys.stderr.flush()
    os._exit(1)


def set_parent_death_signal(number: int) -> int:
    """Let the kernel send this process a signal when its parent exits; returns the previous one.

    0 is no signal. For the main thread of a process; Linux only, elsewhere it does nothing.
    """
    if sys.platform != "linux":
        return 0
    kernel, previous = ctypes.CDLL(None, use_errno=True), ctypes.c_int(0)
    kernel.prctl(PR_GET_PDEATHSIG, ctypes.byref(previous), 0, 0, 0)
    kernel.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    return previous.value


def is_alive(process: psutil.Process) -> bool:
    """True if a process still runs; one that has exited may remain as a zombie."""
    # A parent that does not wait for its child leaves a zombie, whose number still exists.
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    try:
        return bool(process.is_running() and process.status() not in ended)
    except psutil.Error:
        return False


def launchers() -> list[psutil.Process]:
    """The ``torchrun`` that started this process and, if there is one, its ``colossalai run``.

    ``torchrun`` is the nearest ancestor without ``RUN_ID`` in its environment, which it sets for
    its ranks: between them may be a shell script. It may be out of sight in an outer PID namespace.
    ``colossalai run`` (0.5.0) is the parent of a copy of itself for each node, which starts
    ``torchrun`` there. It ends alone and leaves the others running, so the process that the user
    started is returned. Other ancestors are not watched: a shell may end while what it started
    keeps running.
    """
    if RUN_ID not in os.environ:
        return []

    ancestors = psutil.Process().parents()
    above_ranks = [process for process in ancestors if not _has_run_id(process)]
    colossalai = [process for process in above_ranks[1:] if _is_colossalai(process)]
    return [*above_ranks[:1], *colossalai[-1:]]


def _has_run_id(process: psutil.Process) -> bool:
    with suppress(psutil.Error, OSError):
        return RUN_ID in process.environ()
    return False


def _adopts_orphans(process: psutil.Process) -> bool:
    """True for a user's systemd and for the first process, unless a container starts torchrun."""
    with suppress(psutil.Error):
        is_torchrun = any("torch" in word for word in process.cmdline())
        return bool(process.name() == "systemd" or (process.pid == 1 and not is_torchrun))
    return False


def _is_colossalai(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "run" in command and any(Path(part).name == "colossalai" for part in command[:2])


class SignalHandler:
    """SIGTERM, SIGUSR1 and Ctrl-C as requests to stop; a second Ctrl-C ends the process.

    Handles them from ``install`` to ``uninstall``, in the main thread only. SLURM is often asked
    to send SIGUSR1 before the end of a job's time. Meanwhile the exit of a launcher is a request to
    stop as well, which the watchdog makes: the kernel does not kill the process then, but lets it
    continue if it was stopped.

    Attributes:
        received: name of the signal received, empty before; SIGINT prevails.
    """

    def __init__(self) -> None:
        self.received = ""
        self._interrupted_at = math.inf
        self._previous: dict[int, Any] = {}
        self._parent_death_signal = 0

    def install(self) -> None:
        """Replace the handlers, except of a signal that is ignored, and a script's of SIGUSR1."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in REQUESTS:
            if not _is_kept(number):
                self._previous[number] = signal.signal(number, self._handle) or signal.SIG_DFL
        self._parent_death_signal = set_parent_death_signal(signal.SIGCONT)
        is_request_to_stop.set()

    def uninstall(self) -> None:
        is_request_to_stop.clear()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        set_parent_death_signal(self._parent_death_signal)

    def _handle(self, number: int, frame: Any) -> None:
        # After SIGINT, torchrun forwards a second Ctrl-C as SIGTERM.
        now = time.monotonic()
        is_second = now - self._interrupted_at >= SAME_INTERRUPT
        if is_second and number != signal.SIGUSR1:
            os._exit(INTERRUPTED)
        if number == signal.SIGINT:
            self._interrupted_at = min(self._interrupted_at, now)

        # The watchdog's thread logs it: this thread may hold the lock of a log handler.
        if self.received != "SIGINT":
            self.received = signal.Signals(number).name


def _is_kept(number: int) -> bool:
    handler = signal.getsignal(number)
    has_meaning = number == signal.SIGUSR1 and handler is not signal.SIG_DFL
    return has_meaning or handler is signal.SIG_IGN


def init_worker(worker: int = 0) -> None:
    """For workers that a rank forks: end with it, whatever they wait for.

    Schedulers send SIGTERM to all processes of a job, and ``torchrun`` to the process group of a
    rank. The rank still needs its workers then, for the steps up to its checkpoint. So they are a
    process group, ignore Ctrl-C and SIGUSR1, and end at SIGTERM only if the rank has
    sent it, as multiprocessing does to those that do not end by themselves.
    """
    os.setpgrp()
    rank = multiprocessing.parent_process()
    assert rank is not None and rank.pid is not None, "called in a worker"

    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != rank.pid:
        # The rank exited before the kernel was asked to report that.
        os._exit(1)

    for number in (signal.SIGINT, signal.SIGUSR1):
        # A terminal sends Ctrl-C to all of its processes, and the rank still needs clips for its
        # last steps.
        signal.signal(number, signal.SIG_IGN)
    # Python would not run a handler while the main thread waits for a file to open.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_exit_at_sigterm, args=(rank.pid,), name="SIGTERM", daemon=True).start()


@contextmanager
def exiting_after(seconds: float, status: int) -> Iterator[None]:
    """End this process if the block takes longer.

    For what ends a run: it logs, and a log may wait for a full pipe or a dead mount for ever.
    """
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exit_at_sigterm(sender: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != sender:
        pass
    # With status 0: the loader reports others as crashes.
    os._exit(0)


def machine_id() -> str:
    """Identifies the host or container within which process numbers and 127.0.0.1 mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
    except OSError:
        return os.uname().nodename
