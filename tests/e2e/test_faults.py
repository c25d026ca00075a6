"""Runs that lose a rank, a launcher, or their numbers: how they end, what they say, and that nothing is left behind.

Each is a small training as users start it, in which ``faulty.py`` plants the fault. ``make test-faults`` (GRID=all)
does with both launchers and with either rank what CI does once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import free_port, run_ranks
from runs import BIN, ROOT, TRAIN, write_toy_set
from safetensors.torch import load_file

from opensora_sp.checkpoint import committed_checkpoints, newest_checkpoint, verify
from opensora_sp.config import load_train_config
from opensora_sp.training.metrics import read_metrics

ALL = os.environ.get("GRID") == "all"  # make test-faults
LAUNCHERS = ["torchrun", "colossalai"] if ALL else ["torchrun"]


class Job:
    """A training under a launcher, and every process that belongs to it."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        *options: str,
        launcher: str = "torchrun",
        restarts: int = 0,
        faults: dict[int, tuple[str, int, int]] | None = None,
        pause: float = 0.0,
        port: int | None = None,
        script: str = "tests/helpers/faulty.py",
    ) -> None:
        self.config = config
        self.folder, self.outputs, self.log = (
            folder,
            folder / "run",
            folder / f"log {time.monotonic_ns()}",
        )
        self.pids = folder / f"pids_{time.monotonic_ns()}"
        self.pids.mkdir(parents=True)
        self.mark = f"JOB={self.pids}"
        one_node = ["--nproc_per_node", "2", "--master_port", str(port or free_port())]
        here = "0.0.0.0"  # leads to this machine, as 127.0.0.1 does, which is refused where there are several nodes
        nodes = [
            "--nnodes",
            "2",
            "--nproc_per_node",
            "1",
            "--master_addr",
            here,
            "--master_port",
            str(port),
        ]
        start = {
            "torchrun": [BIN / "torchrun", *one_node, "--max-restarts", str(restarts)],
            "colossalai": [BIN / "colossalai", "run", *one_node],
            "node 0": [BIN / "torchrun", *nodes, "--node_rank", "0"],
            "node 1": [BIN / "torchrun", *nodes, "--node_rank", "1"],
        }[launcher]
        command = [
            *start,
            script,
            config,
            "--resume",
            "auto",
            "--cfg-options",
            f"outputs={self.outputs}",
        ]
        environment = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        environment |= {
            "PATH": f"{BIN}:{environment['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
            "GLOO_SOCKET_IFNAME": "lo",  # nodes are processes of this machine
        }
        environment |= {"JOB": str(self.pids), "PIDS": str(self.pids), "PAUSE": str(pause)}
        self.plan = folder / "faults.json"
        environment["FAULTS"] = str(self.plan)
        self.plan.write_text(json.dumps(faults or {}))
        self.process = subprocess.Popen(
            [str(part) for part in (*command, *options)],
            cwd=ROOT,
            env=environment,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # what runs in the background ignores it
        )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, told: str, timeout: float = 120) -> None:
        """Wait until the log says so."""
        deadline = time.monotonic() + timeout
        while told not in self.text:
            assert time.monotonic() < deadline, f"never said {told!r}:\n{self.text}"
            assert self.left(), f"ended without {told!r}:\n{self.text}"
            time.sleep(0.1)

    def until_gone(self, timeout: float, but: str | None = None) -> None:
        """Wait until no process of the job is left, but for those with this word in their command."""
        deadline = time.monotonic() + timeout
        while left := [pid for pid in self.left() if but is None or but not in command_of(pid)]:
            assert time.monotonic() < deadline, f"processes {left} are left behind:\n{self.text}"
            time.sleep(0.1)
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


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    manifest = write_toy_set(folder, 14)
    text = TRAIN.format(manifest=str(manifest)) + "grad_checkpoint = False\n"
    (folder / "config.py").write_text(text)
    return folder / "config.py"


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs of a test, none of which outlives it."""
    started: list[Job] = []
    yield started
    for job in started:
        for pid in job.left():
            os.kill(pid, signal.SIGKILL)
        job.process.wait()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", [0, 1] if ALL else [1])
def test_the_first_error_ends_all_ranks_and_is_told_last(
    config: Path, tmp_path: Path, jobs: list[Job], launcher: str, rank: int
) -> None:
    job = Job(tmp_path, config, launcher=launcher, faults={0: ("raise", rank, 2)})
    jobs.append(job)
    error = "ValueError: got a planted error; expected none; remove it"
    job.until(f"rank {rank} failed: {error}")
    job.until_gone(30)
    assert job.process.returncode == 1
    log, _, report = job.text.partition("tests/helpers/faulty.py FAILED")
    assert f"rank {1 - rank} stops: rank {rank} failed: {error}" in log
    assert (
        rank == 0 or log.count("got a planted error") == report.count("got a planted error") == 1
    ), job.text
    if launcher == "torchrun":  # colossalai adds its whole command to that
        assert job.text.rstrip().splitlines()[-2].endswith(f"rank {rank} failed: {error}")
    assert f"rank {rank} failed: {error}" in (job.outputs / "train.log").read_text()


@pytest.mark.parametrize("rank", [0, 1] if ALL else [1])
def test_the_ranks_of_another_node_end_too(
    config: Path, tmp_path: Path, jobs: list[Job], rank: int
) -> None:
    """Two torchruns, neither of which hears of the other's ranks."""
    port = free_port()
    for node in (0, 1):
        jobs.append(
            Job(
                tmp_path, config, launcher=f"node {node}", faults={0: ("raise", rank, 2)}, port=port
            )
        )
    for node, job in enumerate(jobs):
        job.until(f"rank {rank} failed: ValueError: got a planted error")
        job.until_gone(30)
        assert job.process.returncode == 1
        if node != rank:
            assert f"rank {node} stops: rank {rank} failed" in job.text


def undisturbed(config: Path, outputs: Path) -> None:
    from opensora_sp.training import train

    train(load_train_config(config, [f"outputs={outputs}"]))


def test_a_run_goes_on_whatever_its_ranks_die_of(
    config: Path, tmp_path: Path, jobs: list[Job]
) -> None:
    """One job with several faults, after each of which torchrun starts the ranks again."""
    faults = {
        0: ("kill", 1, 4),  # after the checkpoint of step 3
        1: ("kill in resume", 0, 0),
        2: ("kill in save", 0, 6),
        3: ("stop", 1, 5),
    }
    if ALL:
        faults[4] = ("sleep", 1, 4)
    limits = ["collective_timeout=8", "peer_timeout=5"]
    job = Job(tmp_path, config, *limits, restarts=len(faults), faults=faults)
    jobs.append(job)
    job.until("has sent no heartbeat", 240)
    job.until(f"Sending process {job.rank(1, attempt=3)} closing signal SIGTERM")
    os.kill(
        job.rank(1, attempt=3), signal.SIGCONT
    )  # or torchrun would wait 30 s for it to take its SIGTERM
    assert job.process.wait(120) == 0, job.text
    job.until_gone(10)
    text = job.text
    assert (
        f"rank 0 stops: rank 1 (process {job.rank(1)}) has exited without reporting an error"
        in text
    )
    assert "rank 1 stops: rank 0" in text  # in a resume and in a save
    if ALL:
        stuck = next(
            line
            for line in text.splitlines()
            if "rank 0 has waited 8 s (collective_timeout)" in line
        )
        assert "all_reduce(tensor [3] int32), number" in stuck and "features/batch.py" in stuck
        assert "ranks [0] joined, missing: rank 1, which has called" in stuck
        assert "tests/helpers/faulty.py" in stuck  # where rank 1 stands
    assert "rank 0 stops: rank 1 has sent no heartbeat for 5 s (peer_timeout)" in text
    assert text.count("resumed from") >= 3 and "at step 3" in text
    assert [line["step"] for line in read_metrics(job.outputs)] == [1, 2, 3, 4, 5, 6]
    for checkpoint in committed_checkpoints(job.outputs):
        verify(checkpoint)
    run_ranks(2, undisturbed, config, tmp_path / "whole")
    found, wanted = (
        load_file(tmp_path / run / "step_00000006" / "optimizer.safetensors")
        for run in ("run", "whole")
    )
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def assert_stopped_well(job: Job, told: str) -> int:
    """Nothing is left, the log says why, the last step has a whole checkpoint; returns that step."""
    newest = newest_checkpoint(job.outputs)
    assert newest is not None, job.text
    verify(newest)
    steps = [line["step"] for line in read_metrics(job.outputs)]
    log = (job.outputs / "train.log").read_text()
    assert (
        newest.name == f"step_{steps[-1]:08d}" and f"stopped after step {steps[-1]} of 1000" in log
    )
    assert told in log, log
    return steps[-1]


FOR_LONG = ("max_steps=1000", "ckpt_every=1000")


def test_sigterm_to_the_job_leaves_a_checkpoint(
    config: Path, tmp_path: Path, jobs: list[Job]
) -> None:
    """Also of a loader's workers, which get the signal too."""
    job = Job(tmp_path, config, *FOR_LONG, "num_workers=1", pause=0.3)
    jobs.append(job)
    job.until("2/1000")
    job.process.terminate()
    job.until_gone(30)
    step = assert_stopped_well(job, "SIGTERM")
    again = Job(
        tmp_path, config, *FOR_LONG, "stopped_exit_code=143", pause=0.3
    )  # goes on, and one rank is told
    jobs.append(again)
    again.until(f"{step + 2}/1000")
    os.kill(again.rank(1), signal.SIGTERM)
    again.until_gone(30)
    assert assert_stopped_well(again, "rank 1: SIGTERM") > step
    assert (
        again.process.returncode == 1
        and "exitcode  : 143" in again.text
        and "at step" in again.text
    )


@pytest.mark.parametrize(
    ("launcher", "number"), [("colossalai", signal.SIGTERM), ("torchrun", signal.SIGKILL)]
)
def test_ranks_whose_launcher_has_gone_stop_with_a_checkpoint(
    config: Path, tmp_path: Path, jobs: list[Job], launcher: str, number: int
) -> None:
    job = Job(tmp_path, config, *FOR_LONG, launcher=launcher, pause=0.3)
    jobs.append(job)
    job.until("2/1000")
    job.process.send_signal(number)
    job.until_gone(
        30, but="colossalai"
    )  # a copy of which waits for ever to be told to end, by nobody
    assert_stopped_well(job, f"the launcher (process {job.process.pid}) has exited")
