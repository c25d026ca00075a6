"""Runs whose ranks are forked from the warm process, join as under torchrun, and really exit.

``ranks.run_ranks`` gives each rank a process group and returns what its function returns. Here a
rank begins before the rendezvous, writes a log, and ends with an exit status, or never.
"""

from __future__ import annotations

import os
import pickle
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from polling import wait_until
from ranks import HOST, become_rank, free_port, torchrun_environment, warm_context


class LaunchedRanks:
    """``function(*args)`` on each of some ranks, as processes.

    Attributes:
        processes: by rank.
    """

    def __init__(
        self,
        folder: Path,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        enter: Callable[[int], dict[str, str]] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            folder: for the logs.
            enter: called by each rank before anything else; what it returns is added to the
                environment. Without it, this process hosts the store, as torchrun does.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        variables = dict(environment or {})
        if enter is None:
            self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            variables |= torchrun_environment(self._store.port)
        else:
            variables["MASTER_PORT"] = str(free_port())

        context, work = warm_context(), pickle.dumps((function, args, enter))
        self.processes = []
        for rank in range(world_size):
            arguments = (rank, world_size, self.log(rank), variables, work)
            # No daemon, which could not start workers of a loader.
            self.processes.append(context.Process(target=_rank, args=arguments, daemon=False))
        for process in self.processes:
            process.start()

    def log(self, rank: int) -> Path:
        return self.folder / f"rank {rank}.log"

    def text(self, rank: int) -> str:
        path = self.log(rank)
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


def _rank(rank: int, world_size: int, log: Path, environment: dict[str, str], work: bytes) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)

    become_rank(rank, world_size, **environment)
    function, args, enter = pickle.loads(work)
    if enter is not None:
        os.environ.update(enter(rank))

    from opensora_sp.common.console import log_to_terminal, report_errors

    log_to_terminal()
    with report_errors():
        function(*args)
