"""Jobs whose launcher and ranks are forked from the warm process: a start imports nothing.

The launcher is that of ``torchrun`` (torch's elastic agent), with its handling of signals and its
restarts, as a process of its own. What a rank runs is the script, under the environment and with
the signal handlers that it would have. The phase of imports is missing.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from jobs import Job
from ranks import HOST, warm_context
from runs import ROOT
from torch.distributed.elastic.multiprocessing import MultiprocessContext
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


class ElasticJob(Job):
    """A ``Job`` of two ranks. Its processes are those of its launcher's session."""

    def _start(self, launcher: str, port: int, restarts: int, script: list[str]) -> Any:
        self.log.touch()
        process = warm_context().Process(
            target=_launch, args=(port, restarts, script, self.environment, str(self.log))
        )
        process.start()
        return WarmProcess(process)

    def left(self) -> list[int]:
        pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        return [pid for pid in pids if self._is_own(pid)]

    def _is_own(self, pid: int) -> bool:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        state, session = fields[0], int(fields[3])
        return state not in "ZX" and self.process.pid in (pid, session)


class WarmProcess:
    """A process of multiprocessing with the interface of ``subprocess.Popen``."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, f"the launcher still runs after {timeout} s"
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _launch(
    port: int, restarts: int, script: list[str], environment: dict[str, str], log: str
) -> None:
    """The launcher, in its process: what ``torchrun`` does with its arguments."""
    os.setsid()
    os.chdir(ROOT)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    # Ignored in what a shell starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)

    MultiprocessContext._start = _start_ranks
    elastic_launch(_config(port, restarts), _rank)(script)


def _config(port: int, restarts: int) -> LaunchConfig:
    """As ``torchrun --nproc_per_node 2 --master_port PORT --max-restarts RESTARTS`` makes it."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="none",
        role="default",
        rdzv_backend="static",
        rdzv_endpoint=f"{HOST}:{port}",
        rdzv_configs={"rank": 0, "timeout": 900},
        max_restarts=restarts,
        start_method="fork",
    )


def _start_ranks(self: Any, start: Any = MultiprocessContext._start) -> None:
    # Functions that have returned wait for this event, even if their launcher has ended.
    self._worker_finished_event.set()
    start(self)


def _rank(script: list[str]) -> None:
    """A rank, in its process. Ctrl-C in a terminal reaches it through its launcher alone."""
    os.setpgrp()
    # Those of the launcher, which exec would have reset.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _release_sockets()
    torch.set_num_threads(1)
    sys.argv = list(script)
    runpy.run_path(script[0], run_name="__main__")


def _release_sockets() -> None:
    """Give up the launcher's, which a rank that is started by exec does not have."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for link in list(Path("/proc/self/fd").iterdir()):
        if link.is_symlink() and os.readlink(link).startswith("socket:"):
            os.dup2(nothing, int(link.name))
    os.close(nothing)
