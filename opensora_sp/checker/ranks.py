"""Processes of this host that a check starts, with a deadline and the stacks of those that wait."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .definition import DefinitionError, load_definition
from .layouts import wide
from .report import Finding
from .run import RankResult, Work

# Seconds that other ranks have once one has failed.
GRACE = 5.0
STACK_LINES = 12
HIDDEN_FRAMES = (f"{os.sep}torch{os.sep}", f"opensora_sp{os.sep}checker", "multiprocessing")


class Rank:
    """A process, and how it ended.

    Attributes:
        result: None if the rank has raised or waits.
        finding: why there is no result.
        module: in whose forward pass the rank is.
    """

    def __init__(self, rank: int, folder: str, context: Any, work: Work) -> None:
        self.rank, self.stack_file = rank, Path(folder, f"stack{rank}")
        self.result: RankResult | None = None
        self.finding: Finding | None = None
        self.module: str | None = None
        self.pipe, theirs = context.Pipe()
        arguments = (rank, folder, theirs, work)
        self.process = context.Process(target=_rank_main, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> None:
        """Take a message; raises DefinitionError if the rank has."""
        try:
            kind, content = self.pipe.recv()
        except EOFError:
            self.process.join()
            kind, content = "raised", f"nothing, and exits with {self.process.exitcode}"
        if kind == "refused":
            raise DefinitionError(content)
        if kind == "entered":
            self.module = content
        elif kind == "raised":
            self.finding = Finding("error", f"rank {self.rank} raises {content}", self.module)
        else:
            self.result = content

    def read_stack(self) -> None:
        """Report where the rank waits."""
        os.kill(self.process.pid, signal.SIGUSR2)
        time.sleep(0.3)
        lines = [line.strip() for line in self.stack_file.read_text().splitlines()]
        frames = [line for line in lines if line.startswith("File ")]
        # The innermost frame, and those that are neither torch's nor the checker's.
        kept = [line for line in frames[1:] if not any(part in line for part in HIDDEN_FRAMES)]
        stack = "\n".join([*frames[:1], *kept][:STACK_LINES])
        self.finding = Finding("waiting", f"rank {self.rank} waits:\n{stack}", self.module)


def run_ranks(work: Work) -> list[Rank]:
    """Run the work on processes of this host; returns them with results or findings.

    Raises:
        DefinitionError: of the first rank that raises it.
    """
    # A forked rank imports nothing again, such as this, which dispatch modes need; and it takes
    # functions that cannot be pickled.
    import_module("torch._dynamo")
    can_fork = sys.platform == "linux" and work.device == "cpu"
    context = multiprocessing.get_context("fork" if can_fork else "spawn")
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(work.ranks):
                ranks.append(Rank(rank, folder, context, work))
            _collect(ranks, time.monotonic() + work.seconds)
        finally:
            for started in ranks:
                started.process.kill()
                started.process.join()
    return ranks


def run_as_rank(work: Work) -> list[RankResult]:
    """Run the work as one of the ranks of a process group, all of which call it.

    A rank that waits prints its stack after the deadline, and exits.
    """
    assert dist.group.WORLD is not None
    group = dist.group.WORLD
    faulthandler.dump_traceback_later(work.seconds, exit=True)
    result = work.run(lambda: group, lambda name: None)
    results = [result] * dist.get_world_size()
    dist.all_gather_object(results, result)
    faulthandler.cancel_dump_traceback_later()
    return results


def _collect(ranks: list[Rank], deadline: float) -> None:
    while pending := [rank for rank in ranks if not rank.result and not rank.finding]:
        ready = wait([rank.pipe for rank in pending], max(deadline - time.monotonic(), 0))
        for rank in pending:
            if rank.pipe in ready:
                rank.receive()
            elif not ready:
                rank.read_stack()
        if any(rank.finding for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE)


def _rank_main(rank: int, folder: str, pipe: Connection, work: Work) -> None:
    """The life of a rank; it ends when the parent ends it, so that none sees another's end."""
    stack_file = open(Path(folder, f"stack{rank}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, stack_file, all_threads=False)
    torch.set_num_threads(1)
    backend = "gloo"
    if work.device != "cpu":
        # NCCL refuses two ranks on one GPU.
        backend = "nccl" if torch.cuda.device_count() >= work.ranks else "gloo"
        work.device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(work.device)

    def connect() -> Any:
        store = dist.FileStore(str(Path(folder, "store")), work.ranks)
        # A rank that waits is to be found by the deadline.
        limit = timedelta(seconds=2 * work.seconds + 60)
        dist.init_process_group(backend, None, limit, work.ranks, rank, store)
        return dist.group.WORLD

    # Torch would share the memory of each tensor by a file.
    ForkingPickler.register(Tensor, lambda x: (torch.from_numpy, (wide(x).numpy(),)))
    try:
        work.definition = load_definition(work.definition)
        result = work.run(connect, lambda name: pipe.send(("entered", name)))
        pipe.send(("result", result))
    except DefinitionError as error:
        pipe.send(("refused", str(error)))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno} in {frame.name}"
        pipe.send(("raised", f"{type(error).__name__}: {error} ({place})"))
    signal.pause()
