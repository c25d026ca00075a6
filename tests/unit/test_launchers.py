"""Scripts end with their launcher, whatever they do when it exits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from polling import wait_until

from opensora_sp.runtime import processes
from opensora_sp.runtime.processes import is_alive

ROOT = Path(__file__).parents[2]
# Starts a program as torchrun does, or as ``colossalai run`` starts its copy, and waits for it.
START = """
import os, subprocess, sys
if sys.argv[0] == "torchrun":
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
subprocess.Popen(sys.argv[2:], start_new_session=True).wait()
"""
SCRIPT = """
import ctypes, os, signal, sys, time
from opensora_sp.runtime import processes
processes.INTERVAL = processes.EXIT_TIMEOUT = 0.2

processes.end_with_launchers()
with open("pid.part", "w") as file:
    file.write(str(os.getpid()))
os.rename("pid.part", "pid")
"""
WAIT = "time.sleep(60)"
# C code that keeps Python's lock.
KEEP_LOCK = "ctypes.PyDLL(None).sleep(60)"
HANDLE_SIGTERM = """
handler = processes.SignalHandler()
handler.install()
open("handles", "w").close()
launcher = os.getppid()
while os.getppid() == launcher: time.sleep(0.05)
time.sleep(1.5)
open("saved", "w").close()
handler.uninstall()
time.sleep(60)
"""


@dataclass
class Started:
    """A script, and the launcher that a test ends."""

    launcher: psutil.Popen
    folder: Path

    def script(self) -> psutil.Process:
        """The process of the script, once it runs; it may have ended since."""
        wait_until((self.folder / "pid").exists)
        return psutil.Process(int((self.folder / "pid").read_text()))

    def kill(self) -> None:
        self.launcher.kill()
        self.launcher.wait()


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a script below programs of these names, the outermost first."""
    started = []

    def start(then: str, *names: str, shell: str | None = None) -> Started:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT + then)
        command = [sys.executable, "script.py"]
        if shell is not None:
            command = ["sh", "-c", f"{shell} {' '.join(command)}; true"]
        for name in reversed(names):
            (folder / name).write_text(START)
            command = [sys.executable, name, "run", *command]

        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        launcher = psutil.Popen(command, cwd=folder, env=environment)
        started.append(Started(launcher, folder))
        return started[-1]

    yield start
    for running in started:
        with suppress(psutil.Error):
            for process in [*running.launcher.children(recursive=True), running.launcher]:
                process.kill()
        with suppress(psutil.Error):
            running.script().kill()


@pytest.mark.parametrize("then", [WAIT, KEEP_LOCK], ids=["waits", "keeps the lock"])
def test_a_script_ends_where_torchrun_is_killed(start: Start, then: str) -> None:
    running = start(then, "torchrun")
    script = running.script()
    running.kill()
    wait_until(lambda: not is_alive(script))


def test_a_script_ends_where_colossalai_run_is_killed(start: Start) -> None:
    """Its copy and torchrun stay."""
    running = start(WAIT, "colossalai", "colossalai", "torchrun")
    script = running.script()
    copy, torchrun, _ = running.launcher.children(recursive=True)
    running.kill()
    wait_until(lambda: not is_alive(script))
    copy.kill()
    torchrun.wait(30)


def test_a_script_below_a_shell_lives_as_long_as_the_launcher(start: Start) -> None:
    """Also where the shell lets it ignore SIGTERM."""
    below_shell = start(WAIT, "torchrun", shell="unset RANK; trap '' TERM; exec 2>log;")
    script = below_shell.script()
    below_shell.kill()
    wait_until(lambda: not is_alive(script))
    log = (below_shell.folder / "log").read_text()
    assert f"process {script.pid} ends: its launcher has exited" in log


def test_a_script_that_handles_sigterm_ends_by_itself(start: Start) -> None:
    """So does a training under its watchdog, which saves first. What then hangs is ended.

    A process that was stopped is continued for that.
    """
    running = start(HANDLE_SIGTERM, "torchrun")
    script = running.script()
    wait_until((running.folder / "handles").exists)
    script.suspend()
    wait_until(lambda: script.status() == psutil.STATUS_STOPPED)
    running.kill()
    wait_until((running.folder / "saved").exists)
    wait_until(lambda: not is_alive(script))


class Ancestor(NamedTuple):
    """What ``launchers`` reads of a process."""

    command: str
    is_below_torchrun: bool = False

    def cmdline(self) -> list[str]:
        return self.command.split()

    def environ(self) -> dict[str, str]:
        return {processes.RUN_ID: "1"} if self.is_below_torchrun else {}


TORCHRUN = Ancestor("/usr/bin/python3 /usr/bin/torchrun --nproc_per_node=1")
WRAPPER = Ancestor("/bin/sh", is_below_torchrun=True)
SHELL = Ancestor("/bin/bash -c torchrun")
COLOSSALAI = Ancestor("/usr/bin/python3 /usr/bin/colossalai run")
COPY = Ancestor("/usr/bin/python3 /usr/bin/colossalai run -m")
FORKED = Ancestor("/usr/bin/python3 -c from multiprocessing.forkserver import main")


@pytest.mark.parametrize(
    ("ancestors", "watched"),
    [
        ([WRAPPER, TORCHRUN, SHELL], [TORCHRUN]),
        ([WRAPPER], []),
        ([TORCHRUN, SHELL, COPY, COLOSSALAI], [TORCHRUN, COLOSSALAI]),
        ([TORCHRUN, SHELL, FORKED, FORKED, COLOSSALAI], [TORCHRUN, COLOSSALAI]),
    ],
    ids=["torchrun alone", "in a PID namespace", "a copy by fork", "a copy by a fork server"],
)
def test_launchers_of_a_tree_of_processes(
    monkeypatch: pytest.MonkeyPatch, ancestors: list[Ancestor], watched: list[Ancestor]
) -> None:
    """Python 3.14 starts processes by a server, whose command line its children have."""
    monkeypatch.setenv(processes.RUN_ID, "1")
    monkeypatch.setattr(psutil.Process, "parents", lambda process: ancestors)
    assert processes.launchers() == watched
