"""Processes of this machine, as Linux shows them in ``/proc``; where there is no such folder, none are found."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process, told by the time of its start from a later one with the same number."""

    pid: int
    start: str

    @property
    def is_alive(self) -> bool:
        found = _look_up(self.pid)
        return found is not None and found[0] == self


def this_process() -> Process | None:
    found = _look_up(os.getpid())
    return None if found is None else found[0]


def launchers() -> list[Process]:
    """The ``torchrun`` that started this process and, if that was done by ``colossalai run``, the user's process of it.

    ``torchrun`` stops its workers when it is told to end. ``colossalai run`` (0.5.0) is the parent of a copy of itself
    for each node, which starts ``torchrun`` there; it ends alone and leaves the others running. Other parents are not
    watched: a shell may end, and what it has started go on.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    ancestors = []
    found = _look_up(os.getppid())
    while found is not None:
        ancestors.append(found[0])
        found = _look_up(found[1])
    commands = [one for one in ancestors if _is_colossalai(one.pid)]
    if len(commands) == 1:  # the copy: the one that the user started has gone already
        commands.append(Process(0, ""))
    return ancestors[:1] + commands[-1:]


def leave_process_group(worker: int = 0) -> None:
    """For a loader's workers: ``torchrun`` sends SIGTERM to a rank's whole process group, and would end them.

    They end with the loader, and where their rank has gone.
    """
    os.setpgrp()


def machine() -> str:
    """Names the machine, or the container, within which process numbers and 127.0.0.1 mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
    except OSError:
        return os.uname().nodename


def _look_up(pid: int) -> tuple[Process, int] | None:
    """The process, unless it has ended, and its parent's number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, parent, *rest = text.rpartition(")")[
        2
    ].split()  # what comes before is its name, which may hold anything
    return None if state in "ZX" else (Process(pid, rest[17]), int(parent))


def _is_colossalai(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return "run" in command and any(Path(part).name == "colossalai" for part in command[:2])
