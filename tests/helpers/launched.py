"""Ranks that may die, hang or be killed, forked from the warm process; each has a log.

``ranks.run_ranks`` gives each rank a process group and expects all to return. Here a rank begins as
under torchrun and ends with an exit status, or never (``LaunchedRanks``); or a process that ranks
take for torchrun is part of what may be killed (``WarmJob``).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from polling import wait_until
from ranks import HOST, fork_ranks, torchrun_environment, warm_context

from opensora_sp.parallel import closing_process_group
from opensora_sp.runtime.processes import RUN_ID, end_with_launchers


class LaunchedRanks:
    """``function(*args)`` on each of some ranks, as processes.

    Args:
        folder: for the logs.

    Attributes:
        processes: by rank.
    """

    def __init__(
        self,
        folder: Path,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        variables = dict(environment or {})
        # As torchrun does.
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        variables |= torchrun_environment(self._store.port)
        work = (_reporting_errors, function, *args)
        self.processes = fork_ranks(world_size, [self._log("{rank}")] * 2, variables, *work)

    def _log(self, rank: int | str) -> Path:
        return self.folder / f"rank {rank}.log"

    def text(self, rank: int) -> str:
        path = self._log(rank)
        return path.read_text() if path.exists() else ""

    def texts(self) -> str:
        return "\n".join(
            f"rank {rank}, exit status {process.exitcode}:\n{self.text(rank)}"
            for rank, process in enumerate(self.processes)
        )

    def await_link(self, path: Path, seconds: float = 60) -> str:
        """Wait until a rank has made a link; returns its content."""

        def is_there() -> bool:
            running = any(process.is_alive() for process in self.processes)
            assert running or path.is_symlink(), f"the ranks ended before:\n{self.texts()}"
            return path.is_symlink()

        wait_until(is_there, seconds, lambda: f"nothing happened:\n{self.texts()}")
        return os.readlink(path)

    def await_lines(self, lines: dict[int, re.Pattern[str]], seconds: float) -> float:
        """Wait until the logs of ranks have these lines; returns ``time.monotonic()`` then."""

        def missing() -> list[int]:
            return [rank for rank, line in lines.items() if not line.search(self.text(rank))]

        failure = "ranks {} have not logged {} within {:.1f} s\n{}"
        wait_until(
            lambda: not missing(),
            seconds,
            lambda: failure.format(missing(), list(lines.values()), seconds, self.texts()),
        )
        return time.monotonic()

    def await_end(self, ranks: Iterable[int], seconds: float) -> None:
        """Wait until these ranks have exited."""
        ranks = list(ranks)
        wait_until(
            lambda: not any(self.processes[rank].is_alive() for rank in ranks),
            seconds,
            lambda: f"ranks {ranks} have not all ended\n{self.texts()}",
        )

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(20)


def _reporting_errors(function: Callable[..., Any], *args: Any) -> None:
    from opensora_sp.common.console import log_to_terminal, report_errors

    log_to_terminal()
    with report_errors():
        function(*args)


class WarmJob:
    """Runs ``function(*args)`` on ranks in one process group, under a process of its session.

    The ranks take that process for ``torchrun``; it hosts the store of the rendezvous.

    Args:
        folder: a new folder for the log and for what the ranks return.
        context: where the launcher is forked from, by default the warm process.
    """

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        context: Any = None,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.ranks = folder, range(num_ranks)
        work = pickle.dumps((function, args))
        context = context or warm_context()
        self.process = context.Process(target=_launch, args=(folder, num_ranks, work))
        self.process.start()

    @property
    def text(self) -> str:
        """What all of its processes have printed."""
        log = self.folder / "log"
        return log.read_text() if log.exists() else ""

    def left(self) -> list[int]:
        """The processes of the job that live."""
        return session_members(self.process.pid)

    def until(self, file: Path, seconds: float) -> None:
        """Wait until the job has written a file."""

        def is_written() -> bool:
            is_running = self.process.is_alive()
            assert file.exists() or is_running, f"ended without {file.name}:\n{self._reported()}"
            return file.exists()

        wait_until(is_written, seconds, lambda: f"never wrote {file.name}:\n{self.text}")

    def _reported(self) -> str:
        outcomes = [self.outcome(rank) for rank in self.ranks]
        return "\n".join([self.text, *(outcome[0] or "" for outcome in outcomes if outcome)])

    def wait(self, seconds: float) -> float:
        """Wait until no process is left; returns the time of that."""
        began = time.monotonic()
        # The others end with it, or before.
        self.process.join(seconds)
        wait_until(
            lambda: not self.left(),
            seconds - (time.monotonic() - began),
            lambda: f"processes {self.left()} outlive their run:\n{self.text}",
        )
        return time.time()

    def results(self, seconds: float) -> list[Any]:
        """What the ranks return, all of which must."""
        self.wait(seconds)
        outcomes = [self.outcome(rank) for rank in self.ranks]
        for rank, outcome in enumerate(outcomes):
            assert outcome is not None, f"rank {rank} died:\n{self.text}"
            assert outcome[0] is None, f"rank {rank} failed:\n{outcome[0]}\n{self.text}"
        return [value for _, value in outcomes]

    def outcome(self, rank: int) -> tuple[str | None, Any] | None:
        """The traceback and the value of a rank; None of one that died."""
        path = self.folder / f"rank {rank}"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def kill(self) -> None:
        """End what is left."""
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.process.join()


def session_members(leader: int) -> list[int]:
    """The living processes of a session, and its leader, which may not have begun it yet."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state not in "ZX" and leader in (int(folder.name), int(session)):
            members.append(int(folder.name))
    return members


def _launch(folder: Path, num_ranks: int, work: bytes) -> None:
    os.setsid()
    # As in torchrun, the store of the rendezvous ends with the launcher.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    ranks = fork_ranks(
        num_ranks,
        [folder / "log"] * 2,
        {RUN_ID: "warm"},
        _leaving_outcome,
        *(folder, num_ranks, store.port, work),
        context=multiprocessing.get_context("fork"),
    )
    for process in ranks:
        process.join()


def _leaving_outcome(folder: Path, num_ranks: int, port: int, work: bytes) -> None:
    end_with_launchers()
    rank = int(os.environ["RANK"])
    try:
        store = dist.TCPStore(HOST, port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        with closing_process_group():
            function, args = pickle.loads(work)
            outcome = (None, function(*args))
    except BaseException:
        outcome = (traceback.format_exc(), None)

    (folder / f".rank {rank}").write_bytes(pickle.dumps(outcome))
    (folder / f".rank {rank}").rename(folder / f"rank {rank}")
    sys.stdout.flush()
