"""Run a function on several gloo processes, one thread each, and bring its results or its first error back."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.parallel import closing_process_group

HOST = "127.0.0.1"
PRELOADED = [
    "opensora_sp.models",
    "opensora_sp.parallel",
    "opensora_sp.plugin",
]  # imported once, then forked


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 300
) -> list[Any]:
    """``[function(*args) of rank 0, of rank 1, ...]``; ``function`` must be importable and its result picklable.

    The processes are forked from one that has imported what most tests need. The store by which they meet lives here,
    on a port of its own choosing, and each process has a pipe of its own: nobody takes the port in between, a process
    that leaves first takes nothing with it, and one that dies is noticed. Where the time runs out, each process says
    where it stands.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    folder = tempfile.TemporaryDirectory()
    stacks = Path(folder.name)
    work = pickle.dumps(
        (function, args)
    )  # as bytes: tensors would be sent as open files, of which few can be
    workers: dict[Connection, Any] = {}
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_worker, args=(rank, num_ranks, store.port, theirs, stacks, work), daemon=True
        )
        process.start()
        theirs.close()  # so that its end is ours too
        workers[ours] = process
    try:
        return _collect(list(workers), list(workers.values()), stacks, timeout)
    finally:
        for process in workers.values():
            process.join(timeout=20)
            process.kill()
        folder.cleanup()


def _collect(
    pipes: list[Connection], processes: list[Any], stacks: Path, timeout: float
) -> list[Any]:
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(values) < len(pipes):
        ready = wait(
            [pipe for rank, pipe in enumerate(pipes) if rank not in values],
            deadline - time.monotonic(),
        )
        if not ready:
            hang = sorted(set(range(len(pipes))) - set(values))
            raise AssertionError(f"ranks {hang} hang:\n" + _stand(processes, stacks))
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                error, value = pipe.recv()
            except EOFError:
                processes[rank].join(20)
                error, value = f"died with exit code {processes[rank].exitcode}", None
            if error:
                for process in processes:
                    process.kill()
                raise AssertionError(f"rank {rank} failed:\n{error}")
            values[rank] = pickle.loads(value)
    return [values[rank] for rank in range(len(pipes))]


def _stand(processes: list[Any], stacks: Path) -> str:
    """Where each thread of each living process stands."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(2)
    for process in processes:
        process.kill()
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(stacks.iterdir()))


def _worker(
    rank: int, num_ranks: int, port: int, pipe: Connection, stacks: Path, work: bytes
) -> None:
    stack = (stacks / f"rank {rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), OMP_NUM_THREADS="1"
    )
    try:
        store = dist.TCPStore(HOST, port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        with closing_process_group():
            function, args = pickle.loads(work)
            value = function(*args)
            pipe.send(
                (None, pickle.dumps(value))
            )  # as bytes: this process ends before shared memory is read
    except BaseException:
        pipe.send((traceback.format_exc(), None))
