"""Processes of this host that a check starts, with a deadline and the stacks of those that wait."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .definition import DefinitionError, load_definition
from .run import RankResult, Work

# Seconds that other ranks have once one has failed.
GRACE = 5.0
STACK_LINES = 12
HIDDEN_FRAMES = (f"{os.sep}torch{os.sep}", f"opensora_sp{os.sep}checker{os.sep}", "multiprocessing")


@dataclass
class Outcome:
    """End of a rank: its result, an error that it has raised, or the stack where it waits."""

    result: RankResult | None = None
    raised: str = ""
    stack: str = ""
    module: str | None = None


@dataclass
class _Rank:
    process: Any
    pipe: Connection
    stack_file: Path
    outcome: Outcome = field(default_factory=Outcome)
    is_done: bool = False


def run_ranks(
    source: Any, ranks: int, seed: int, dtype: torch.dtype, seconds: float
) -> list[Outcome]:
    """Run the check's work on gloo processes of this host; returns an outcome for each rank.

    Raises:
        DefinitionError: of the first rank that raises it.
    """
    # A forked rank imports nothing again, such as this, which dispatch modes need; and it takes
    # functions that cannot be pickled.
    import_module("torch._dynamo")
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                arguments = (rank, ranks, folder, theirs, source, seed, dtype, seconds)
                process = context.Process(target=_rank_main, args=arguments, daemon=True)
                process.start()
                theirs.close()
                started.append(_Rank(process, ours, Path(folder, f"stack{rank}")))
            _collect(started, seconds)
        finally:
            for rank_process in started:
                rank_process.process.kill()
                rank_process.process.join()
    return [rank_process.outcome for rank_process in started]


def _collect(ranks: list[_Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while pending := {rank.pipe: rank for rank in ranks if not rank.is_done}:
        ready = wait(list(pending), max(deadline - time.monotonic(), 0))
        if not ready:
            _read_stacks(list(pending.values()))
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending[pipe]
            _receive(rank)
            if rank.outcome.raised:
                deadline = min(deadline, time.monotonic() + GRACE)


def _receive(rank: _Rank) -> None:
    try:
        kind, content = rank.pipe.recv()
    except EOFError:
        rank.process.join()
        kind, content = "raised", f"end of the process, exit status {rank.process.exitcode}"

    if kind == "entered":
        rank.outcome.module = content
        return
    rank.is_done = True
    _take(rank.outcome, kind, content)


def _take(outcome: Outcome, kind: str, content: Any) -> None:
    if kind == "bad input":
        raise DefinitionError(content)
    if kind == "raised":
        outcome.raised = content
    else:
        outcome.result = torch.load(io.BytesIO(content), weights_only=False)


def _read_stacks(waiting: list[_Rank]) -> None:
    """Have the ranks that wait write the stacks of their threads."""
    for rank in waiting:
        os.kill(rank.process.pid, signal.SIGUSR2)
    time.sleep(0.5)
    for rank in waiting:
        lines = rank.stack_file.read_text().splitlines() if rank.stack_file.exists() else []
        # The innermost frame, and what is neither torch's nor the checker's.
        frames = [line.strip() for line in lines if line.strip().startswith("File ")]
        kept = [line for line in frames[1:] if not any(part in line for part in HIDDEN_FRAMES)]
        rank.outcome.stack = "\n".join([*frames[:1], *kept][:STACK_LINES]) or "(no stack)"


def run_as_rank(definition: Any, seed: int, dtype: torch.dtype, seconds: float) -> list[Outcome]:
    """Run the check's work as a rank that a launcher has started; returns all ranks' outcomes.

    A rank that waits prints its stack after ``seconds``, and ends.

    Raises:
        DefinitionError: on all ranks.
    """
    device = "cpu"
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = f"cuda:{local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)

    def connect() -> dist.ProcessGroup:
        if not dist.is_initialized():
            dist.init_process_group()
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    faulthandler.dump_traceback_later(seconds, exit=True)
    work = Work(definition, seed, dtype, device)
    answer = outcome_of(work, connect, lambda name: None)
    answers = [answer] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    faulthandler.cancel_dump_traceback_later()
    outcomes = [Outcome() for _ in answers]
    for outcome, (kind, content) in zip(outcomes, answers):
        _take(outcome, kind, content)
    return outcomes


def _rank_main(
    rank: int,
    ranks: int,
    folder: str,
    pipe: Connection,
    source: Any,
    seed: int,
    dtype: torch.dtype,
    seconds: float,
) -> None:
    """The life of a rank; it ends when the parent ends it, so that none sees another's end."""
    stack_file = open(Path(folder, f"stack{rank}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, stack_file, all_threads=False)
    torch.set_num_threads(1)

    def connect() -> dist.ProcessGroup:
        store = dist.FileStore(str(Path(folder, "store")), ranks)
        limit = timedelta(seconds=2 * seconds + 60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    work = Work(load_definition(source), seed, dtype)
    pipe.send(outcome_of(work, connect, lambda name: pipe.send(("entered", name))))
    signal.pause()


def outcome_of(
    work: Work, connect: Callable[[], dist.ProcessGroup], on_enter: Callable[[str], object]
) -> tuple[str, Any]:
    """("bad input", text), ("raised", text) or ("result", bytes) of this rank's work."""
    reference, exact, refusal = None, None, ""
    try:
        # Before there is a process group, which a model could ask for.
        reference, exact = work.reference()
    except DefinitionError as error:
        refusal = str(error)

    try:
        group = connect()
        refusals = [""] * dist.get_world_size()
        dist.all_gather_object(refusals, refusal)
        if any(refusals) or reference is None:
            raise DefinitionError(next(filter(None, refusals)))
        result = work.parallel(group, reference, on_enter)
        if dist.get_rank() == 0:
            result.reference, result.exact = reference, exact
    except DefinitionError as error:
        return "bad input", str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno} in {frame.name}"
        return "raised", f"{type(error).__name__}: {error} ({place})"

    buffer = io.BytesIO()
    torch.save(result, buffer)
    return "result", buffer.getvalue()
