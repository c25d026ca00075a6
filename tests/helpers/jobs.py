"""A training under a launcher, with every process that belongs to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planted_faults import Fault
from polling import wait_until
from ranks import free_port
from runs import BIN, ROOT

from opensora_sp.checkpoint import newest_checkpoint, verify
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
    assert (
        newest.name == f"step_{steps[-1]:08d}" and f"stopped after step {steps[-1]} of 1000" in log
    )
    assert message in log, log
    return steps[-1]


FOR_LONG = ("max_steps=1000", "ckpt_every=1000")
