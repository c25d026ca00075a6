"""A launcher with its ranks in warm forks, any process of which may be killed.

``ranks.run_ranks`` expects all ranks to return. Here they may die, as may the launcher, and what is
left of them is counted: all processes of a job share a session.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from polling import wait_until
from ranks import HOST, become_rank, warm_context

from opensora_sp.parallel import closing_process_group
from opensora_sp.runtime.processes import RUN_ID, end_with_launchers


class WarmJob:
    """Runs ``function(*args)`` on several ranks, under a process that they take for ``torchrun``.

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
        session = self.process.pid
        found = [session] if self.process.is_alive() else []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and _session_of(folder) == session:
                found.append(int(folder.name))
        return sorted(set(found))

    def until(self, file: Path, seconds: float) -> None:
        """Wait until the job has written a file."""

        def is_written() -> bool:
            is_running = self.process.is_alive()
            assert file.exists() or is_running, f"ended without {file.name}:\n{self._reported()}"
            return file.exists()

        wait_until(is_written, seconds, lambda: f"never wrote {file.name}:\n{self.text}")

    def _reported(self) -> str:
        outcomes = [self.outcome(rank) for rank in self.ranks]
        return "\n".join([self.text, *(one[0] for one in outcomes if one and one[0])])

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


def _session_of(folder: Path) -> int | None:
    """The session of a living process, by its folder in ``/proc``."""
    try:
        state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(session)


def _launch(folder: Path, num_ranks: int, work: bytes) -> None:
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)

    # As in torchrun, the store of the rendezvous ends with the launcher.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(num_ranks):
        args = (rank, num_ranks, store.port, folder, work)
        ranks.append(context.Process(target=_rank, args=args))
        ranks[-1].start()
    for process in ranks:
        process.join()


def _rank(rank: int, num_ranks: int, port: int, folder: Path, work: bytes) -> None:
    become_rank(rank, num_ranks, **{RUN_ID: "warm"})
    end_with_launchers()

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
