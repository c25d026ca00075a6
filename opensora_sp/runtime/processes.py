"""Processes of this host: the launcher, other ranks, and the workers of a rank's loader."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .launchers import is_alive as is_alive
from .launchers import launchers as launchers
from .launchers import set_parent_death_signal


def init_worker(worker: int = 0) -> None:
    """For workers that a rank forks: end with it, whatever they wait for, and release its ports.

    Schedulers send SIGTERM to all processes of a job, and ``torchrun`` to the process group of a
    rank. The rank still needs its workers then, for the steps up to its checkpoint. So they have a
    process group of their own, ignore Ctrl-C and SIGUSR1, and end at SIGTERM only if the rank has
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
        signal.signal(number, signal.SIG_IGN)
    # Python would not run a handler while the main thread waits for a file to open.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_exit_at_sigterm, args=(rank.pid,), name="SIGTERM", daemon=True).start()
    _release_ports()


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


def _release_ports() -> None:
    """Close the listening sockets that a fork has copied.

    A process that waits for a dead mount cannot even be killed, and would occupy the ports of the
    next run. The numbers stay in use, since the copies of their owners will close them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if _is_listening(number):
            os.dup2(nothing, number)
    os.close(nothing)


def _is_listening(descriptor: int) -> bool:
    try:
        opened = socket.socket(fileno=descriptor)
    except OSError:  # no socket
        return False
    try:
        return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        opened.detach()


def machine_id() -> str:
    """Identifies the host or container within which process numbers and 127.0.0.1 mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
    except OSError:
        return os.uname().nodename
