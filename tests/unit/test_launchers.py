"""Scripts end with their launcher, whatever they do when it exits."""

from __future__ import annotations

import os
import shutil
import subprocess
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

    def has_ended(self) -> bool:
        try:
            return not is_alive(self.script())
        except psutil.NoSuchProcess:
            return True

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
    for one in started:
        with suppress(psutil.Error):
            for process in [*one.launcher.children(recursive=True), one.launcher]:
                process.kill()
        with suppress(psutil.Error):
            one.script().kill()


@pytest.mark.parametrize("then", [WAIT, KEEP_LOCK], ids=["waits", "keeps the lock"])
def test_a_script_ends_where_torchrun_is_killed(start: Start, then: str) -> None:
    one = start(then, "torchrun")
    script = one.script()
    one.kill()
    wait_until(lambda: not is_alive(script))


def test_a_script_ends_where_colossalai_run_is_killed(start: Start) -> None:
    """Its copy and torchrun stay."""
    one = start(WAIT, "colossalai", "colossalai", "torchrun")
    script = one.script()
    copy, torchrun, _ = one.launcher.children(recursive=True)
    one.kill()
    wait_until(lambda: not is_alive(script))
    copy.kill()
    torchrun.wait(30)


def test_a_script_ends_whose_launcher_has_gone_before_its_first_line(start: Start) -> None:
    """And one below a shell script, which the launcher has started, lives as long as this.

    Also where the shell lets it ignore SIGTERM.
    """
    orphan = start(WAIT, "torchrun", shell="sleep 0.5;")
    wait_until(lambda: any(p.name() == "sleep" for p in orphan.launcher.children(recursive=True)))
    orphan.kill()

    below_shell = start(WAIT, "torchrun", shell="unset RANK; trap '' TERM; exec 2>log;")
    script = below_shell.script()
    wait_until(lambda: orphan.has_ended())
    assert is_alive(script)
    below_shell.kill()
    wait_until(lambda: not is_alive(script))
    log = (below_shell.folder / "log").read_text()
    assert f"process {script.pid} ends: its launcher has exited" in log


def test_a_script_that_handles_sigterm_ends_by_itself(start: Start) -> None:
    """So does a training under its watchdog, which saves first. What then hangs is ended.

    A process that was stopped is continued for that.
    """
    one = start(HANDLE_SIGTERM, "torchrun")
    script = one.script()
    wait_until((one.folder / "handles").exists)
    script.suspend()
    wait_until(lambda: script.status() == psutil.STATUS_STOPPED)
    one.kill()
    wait_until((one.folder / "saved").exists)
    wait_until(lambda: not is_alive(script))


def test_ancestors_up_to_one_that_has_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher is watched even where one of its own ancestors exits at that moment."""
    launcher = psutil.Process().parent()
    own_parent = psutil.Process.parent

    def parent(process: psutil.Process) -> psutil.Process | None:
        if process == launcher:
            raise psutil.NoSuchProcess(process.pid)
        return own_parent(process)

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(psutil.Process, "parent", parent)
    monkeypatch.setattr(processes, "_has_run_id", lambda process: False)
    assert processes.launchers()[0] == launcher


@dataclass(frozen=True)
class Ancestor:
    """What ``launchers`` reads of a process."""

    program: str
    pid: int = 20
    parent: int = 10
    is_below_torchrun: bool = False

    def exe(self) -> str:
        return self.program

    def cmdline(self) -> list[str]:
        return [self.program]

    def name(self) -> str:
        return Path(self.program).name

    def environ(self) -> dict[str, str]:
        return {"TORCHELASTIC_RUN_ID": "1"} if self.is_below_torchrun else {}

    def ppid(self) -> int:
        return self.parent


INIT = Ancestor("/sbin/init", pid=1, parent=0)
SYSTEMD = Ancestor("/usr/lib/systemd/systemd")
WRAPPER = Ancestor("/bin/sh", is_below_torchrun=True)
FIRST_WRAPPER = Ancestor("/bin/sh", pid=1, parent=0, is_below_torchrun=True)
FROZEN = Ancestor("/opt/train.pex")
FRAMEWORK = Ancestor("/Python.app/Contents/MacOS/Python")


@pytest.mark.parametrize(
    ("ancestors", "expected"),
    [
        pytest.param([WRAPPER, FROZEN, INIT], [FROZEN], id="frozen"),
        pytest.param([WRAPPER, FRAMEWORK, INIT], [FRAMEWORK], id="framework build"),
        pytest.param([FIRST_WRAPPER], [], id="first wrapper of a namespace"),
        pytest.param([WRAPPER, FIRST_WRAPPER], [], id="wrappers in a namespace"),
        pytest.param([INIT], [None], id="exited"),
        pytest.param([WRAPPER, INIT], [None], id="exited, wrapper left"),
        pytest.param([SYSTEMD, INIT], [None], id="exited, adopted by a user's systemd"),
    ],
)
def test_torchrun_where_its_program_is_not_called_python(
    monkeypatch: pytest.MonkeyPatch, ancestors: list[Ancestor], expected: list[Ancestor | None]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(processes, "_ancestors", lambda: ancestors)
    assert processes.launchers() == expected


def test_a_rank_in_a_pid_namespace_does_not_see_torchrun() -> None:
    enter = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], check=False).returncode:
        pytest.skip("no user namespaces")

    program = (
        "from opensora_sp.runtime import processes\n"
        "print([p and p.pid for p in processes.launchers()])"
    )
    watched = subprocess.run(
        [*enter, sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert watched.stdout.strip() == "[]"


class Ancestor(NamedTuple):
    """An ancestor of a rank, by its command."""

    pid: int
    command: str

    def exe(self) -> str:
        return self.command.split()[0]

    def cmdline(self) -> list[str]:
        return self.command.split()

    def environ(self) -> dict[str, str]:
        return {}

    def name(self) -> str:
        return Path(self.exe()).name


TORCHRUN = Ancestor(4, "/usr/bin/python3 /usr/bin/torchrun --nproc_per_node=1")
SHELL = Ancestor(5, "/bin/bash -c torchrun")
COPY = Ancestor(6, "/usr/bin/python3 /usr/bin/colossalai run")
FORKED = Ancestor(6, "/usr/bin/python3 -c from multiprocessing.forkserver import main")
SERVER = Ancestor(7, "/usr/bin/python3 -c from multiprocessing.forkserver import main")
COLOSSALAI = Ancestor(8, "/usr/bin/python3 /usr/bin/colossalai run")


@pytest.mark.parametrize(
    ("ancestors", "watched"),
    [
        ([TORCHRUN, SHELL], [TORCHRUN]),
        ([TORCHRUN, SHELL, COPY, COLOSSALAI], [TORCHRUN, COLOSSALAI]),
        ([TORCHRUN, COPY], [TORCHRUN, None]),
        ([TORCHRUN, SHELL, FORKED, SERVER, COLOSSALAI], [TORCHRUN, COLOSSALAI]),
    ],
    ids=["torchrun alone", "a copy by fork", "the copy is left", "a copy by a fork server"],
)
def test_launchers_of_a_tree_of_processes(
    monkeypatch: pytest.MonkeyPatch, ancestors: list[Ancestor], watched: list[Ancestor | None]
) -> None:
    """Python 3.14 starts processes by a server, whose command line its children have."""
    monkeypatch.setenv(processes.RUN_ID, "1")
    monkeypatch.setattr(processes, "_ancestors", lambda: ancestors)
    assert processes.launchers() == watched
