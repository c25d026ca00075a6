"""Ranks of this host that a process starts by itself, keeps, and starts again after a failure.

They run as under ``torchrun``: the same environment, and a store that the starting process hosts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opensora_sp.common.console import log_to_terminal

from .processes import set_parent_death_signal

HOST = "127.0.0.1"
INTERVAL = 0.2  # seconds between two looks at whether to cancel
STORE_TIMEOUT = 300.0  # seconds that the store waits for a name
EXIT_TIMEOUT = 5.0  # seconds for each rank to end by itself after one of them has
FAILED = "failed"


class LocalRanks:
    """``nproc`` processes that run ``function(pipe)``; they start when the first work is sent.

    Rank 0 answers a work through its pipe: any number of times ``("step", ...)``, then another
    tuple. An exception that leaves the function of any rank ends all of them.

    Args:
        function: importable by its name; returns when its pipe is closed (EOFError).
        log: file that gets what the ranks print.
        context: of multiprocessing, which starts them.
    """

    def __init__(
        self, nproc: int, function: Callable[[Connection], None], log: Path, context: Any = None
    ) -> None:
        self.nproc, self.function, self.log = nproc, function, log
        self.context = context or multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        # Held to start or end processes.
        self._lock, self._is_closed = threading.Lock(), False

    def run(
        self, work: Any, *, on_step: Callable[..., object], is_cancelled: Callable[[], bool]
    ) -> tuple[Any, ...]:
        """Send work to all ranks; returns the answer of rank 0.

        Args:
            on_step: gets the content of each step's message.
            is_cancelled: asked several times a second; rank 0 then gets None, once.

        Raises:
            ValueError: if a rank fails or exits. All are ended, and the next call starts them,
                unless they are closed.
        """
        try:
            # Also after a start that failed half-way.
            living = [process for process in self.processes if process.is_alive()]
            if len(living) < self.nproc:
                self.stop()
                self._start()
            return self._run(work, on_step, is_cancelled)
        except BaseException:
            self.stop()
            raise

    def _run(
        self, work: Any, on_step: Callable[..., object], is_cancelled: Callable[[], bool]
    ) -> tuple[Any, ...]:
        is_sent = False
        try:
            for pipe in self._pipes:
                pipe.send(work)
            while True:
                if not is_sent and is_cancelled():
                    is_sent = True
                    # To rank 0 alone, which informs the others between two steps; else they might
                    # stop at different ones.
                    self._pipes[0].send(None)
                for ready in wait(self._pipes, INTERVAL):
                    assert isinstance(ready, Connection)
                    kind, *content = ready.recv()
                    if kind == FAILED:
                        raise ValueError(content[0])
                    if kind != "step":
                        return (kind, *content)
                    on_step(*content)
        except (EOFError, OSError):
            raise ValueError(self._describe_end()) from None

    def _describe_end(self) -> str:
        """The reason that a rank has sent, or the ranks that have ended."""
        for process in self.processes:
            process.join(EXIT_TIMEOUT)
        for pipe in self._pipes:
            with suppress(EOFError, OSError):
                while pipe.poll():
                    kind, *content = pipe.recv()
                    if kind == FAILED:
                        return str(content[0])

        codes = [process.exitcode for process in self.processes]
        return (
            f"got the end of a rank during its work (exit status by rank: {codes}); expected all "
            f"{self.nproc} ranks to live; look at {self.log}, then try again, which starts them"
        )

    def _start(self) -> None:
        with self._lock:
            if self._is_closed:
                raise ValueError(
                    "got work for ranks that are closed; expected none after the request to stop; "
                    "start again"
                )
            # As torchrun does: no rank has to find a free port.
            limit = timedelta(seconds=STORE_TIMEOUT)
            self._server = dist.TCPStore(HOST, 0, None, True, limit, wait_for_workers=False)
            for rank in range(self.nproc):
                self._start_rank(rank)

    def _start_rank(self, rank: int) -> None:
        ours, theirs = self.context.Pipe()
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.nproc}
        launch |= {"LOCAL_WORLD_SIZE": self.nproc, "MASTER_PORT": self._server.port}
        arguments = (launch, theirs, self.log, self.function)
        process = self.context.Process(target=_enter, args=arguments)
        process.start()
        theirs.close()
        # An open copy here would hide that the rank has ended.
        self._pipes.append(ours)
        self.processes.append(process)

    def stop(self) -> None:
        """End the ranks, whatever they do; for the thread that runs work."""
        with self._lock:
            self._kill()
            for pipe in self._pipes:
                pipe.close()
            self.processes, self._pipes = [], []

    def close(self) -> None:
        """End the ranks for good, from any thread; running and later work raises ValueError."""
        with self._lock:
            self._is_closed = True
            # Their pipes are left to the thread that reads them.
            self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _enter(
    launch: dict[str, int], pipe: Connection, log: Path, function: Callable[[Connection], None]
) -> None:
    """The life of a rank."""
    set_parent_death_signal(signal.SIGKILL)
    # Appended, since all ranks write here.
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= agent | {name: str(number) for name, number in launch.items()}
    os.environ["MASTER_ADDR"] = HOST
    log_to_terminal()

    try:
        function(pipe)
    except Exception as error:
        is_explained = isinstance(error, ValueError)
        text = f"got {type(error).__name__} on rank {launch['RANK']} ({error}); expected its work "
        text += f"to end without; look at {log}, ask for less, or try again"
        # Where another rank has failed first, only that one says why.
        if not getattr(error, "is_consequence", False):
            with suppress(OSError):
                pipe.send((FAILED, str(error) if is_explained else text))
        raise
