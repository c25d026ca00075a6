"""Processes of this host: the launcher, other ranks, and whether they still run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil


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

    ``torchrun`` stops its workers when it is asked to end. ``colossalai run`` (0.5.0) is the parent
    of a copy of itself for each node, which starts ``torchrun`` there. It ends alone and leaves the
    others running, so the process that the user started is returned; None if it has exited already.
    Other parents are not watched: a shell may end while what it started keeps running.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []

    ancestors = _ancestors()
    colossalai: list[psutil.Process | None] = [one for one in ancestors if _is_colossalai(one)]
    if len(colossalai) == 1:  # the copy
        colossalai.append(None)
    return [*ancestors[:1], *colossalai[-1:]]


def leave_process_group(worker: int = 0) -> None:
    """For loader workers: move this process to a process group of its own.

    ``torchrun`` sends SIGTERM to the whole process group of a rank, and would end its workers. They
    end with the loader, and when their rank exits.
    """
    os.setpgrp()


def machine_id() -> str:
    """Identifies the host or container within which process numbers and 127.0.0.1 mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
    except OSError:
        return os.uname().nodename


def _ancestors() -> list[psutil.Process]:
    """The parent of this process, its parent, and so on, up to one that has exited."""
    ancestors = []
    with suppress(psutil.Error):
        process = psutil.Process().parent()
        while process is not None:
            ancestors.append(process)
            process = process.parent()
    return ancestors


def _is_colossalai(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "run" in command and any(Path(part).name == "colossalai" for part in command[:2])
