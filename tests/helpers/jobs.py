"""A training under a launcher, real or forked, with every process that belongs to it."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from launched import session_members
from planted_faults import Fault
from polling import wait_until
from ranks import HOST, free_port, warm_context
from runs import BIN, ROOT
from torch.distributed.elastic.multiprocessing import MultiprocessContext
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.paths import newest_checkpoint
from opensora_sp.training.metrics import read_metrics


def launch_command(launcher: str, port: int, restarts: int) -> list[str | Path]:
    """The launcher of two ranks, or of one of the two nodes that have one rank each."""
    one_node = ["--nproc_per_node", "2", "--master_port", str(port)]
    if launcher == "torchrun":
        return [BIN / "torchrun", *one_node, "--max-restarts", str(restarts)]
    if launcher == "colossalai":
        return [BIN / "colossalai", "run", *one_node]

    # This machine, as 127.0.0.1, which is refused where there are several nodes.
    here = ["--master_addr", "0.0.0.0", "--master_port", str(port)]
    rank = launcher.removeprefix("node ")
    return [
        *(BIN / "torchrun", "--nnodes", "2", "--nproc_per_node", "1"),
        *(*here, "--node_rank", rank),
    ]


class Job:
    """A training under a launcher, and every process that belongs to it."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        *options: str,
        launcher: str = "torchrun",
        restarts: int = 0,
        faults: dict[int, Fault] | None = None,
        pause: float = 0.0,
        port: int | None = None,
        script: str = "tests/helpers/planted_faults.py",
    ) -> None:
        self.config, self.folder, self.outputs = config, folder, folder / "run"
        self.log = folder / f"log {time.monotonic_ns()}"
        self.pids = folder / f"pids_{time.monotonic_ns()}"
        self.pids.mkdir(parents=True)
        self.mark = f"JOB={self.pids}"
        self.plan = folder / "faults.json"
        planned = {attempt: asdict(fault) for attempt, fault in (faults or {}).items()}
        self.plan.write_text(json.dumps(planned))

        script_options = ["--resume", "auto", "--cfg-options", f"outputs={self.outputs}", *options]
        self.environment = self._environment(pause)
        self.process = self._start(
            launcher, port or free_port(), restarts, [script, str(config), *script_options]
        )

    def _start(self, launcher: str, port: int, restarts: int, script: list[str]) -> Any:
        """Start the launcher with a script and its arguments; returns it, as ``Popen`` would."""
        command = [*launch_command(launcher, port, restarts), *script]
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=self.environment,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # What runs in the background ignores it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def _environment(self, pause: float) -> dict[str, str]:
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        inherited = {name: value for name, value in os.environ.items() if name not in ranks}
        return inherited | {
            "PATH": f"{BIN}:{inherited['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
            "GLOO_SOCKET_IFNAME": "lo",  # nodes are processes of this machine
            "JOB": str(self.pids),
            "PIDS": str(self.pids),
            "PAUSE": str(pause),
            "FAULTS": str(self.plan),
        }

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, message: str, timeout: float = 120) -> None:
        """Wait until the log has this message."""

        def is_logged() -> bool:
            if message in self.text:
                return True
            assert self.left() or message in self.text, f"ended without {message!r}:\n{self.text}"
            return False

        wait_until(is_logged, timeout, lambda: f"never logged {message!r}:\n{self.text}")

    def until_gone(self, timeout: float, but: str | None = None) -> None:
        """Wait until no process of the job is left, except those with a word in their command."""

        def remaining() -> list[int]:
            return [pid for pid in self.left() if but is None or but not in command_of(pid)]

        wait_until(
            lambda: not remaining(),
            timeout,
            lambda: f"processes {remaining()} are left behind:\n{self.text}",
        )
        self.process.wait(5)

    def left(self) -> list[int]:
        """Processes, of any age and parent, that this job has started."""
        self.process.poll()  # so that it is no zombie
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    marked = self.mark in (folder / "environ").read_bytes().decode(
                        errors="replace"
                    ).split("\0")
                    alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                except OSError:
                    continue
                found += [int(folder.name)] if marked and alive else []
        return found

    def rank(self, rank: int, attempt: int = 0) -> int:
        return int((self.pids / f"{attempt}-{rank}").read_text())


def command_of(pid: int) -> list[str]:
    try:
        return [
            Path(part).name
            for part in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        ]
    except OSError:
        return []


def started_ranks(job: Job) -> list[int]:
    """The two ranks that torchrun has started, or [] before it has."""
    ranks = [pid for pid in job.left() if command_of(pid)[1:2] == ["-u"]]
    return sorted(ranks) if len(ranks) == 2 else []


def assert_stopped_well(job: Job, message: str) -> int:
    """The log has the reason and the last step a whole checkpoint; returns that step."""
    newest = newest_checkpoint(job.outputs)
    assert newest is not None, job.text
    verify(newest)
    steps = [line["step"] for line in read_metrics(job.outputs)]
    log = (job.outputs / "train.log").read_text()
    assert newest.name == f"step_{steps[-1]:08d}"
    assert f"stopped after step {steps[-1]} of 1000" in log
    assert message in log, log
    return steps[-1]


FOR_LONG = ("max_steps=1000", "ckpt_every=1000")


class ElasticJob(Job):
    """A ``Job`` of two ranks whose launcher and ranks are forked from the warm process.

    The launcher is that of ``torchrun`` (torch's elastic agent), with its handling of signals and
    its restarts. What a rank runs is the script, under the environment and with the signal handlers
    that it would have. The phase of imports is missing.
    """

    def _start(self, launcher: str, port: int, restarts: int, script: list[str]) -> Any:
        self.log.touch()
        process = warm_context().Process(
            target=_launch, args=(port, restarts, script, self.environment, str(self.log))
        )
        process.start()
        return WarmProcess(process)

    def left(self) -> list[int]:
        return session_members(self.process.pid)


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
