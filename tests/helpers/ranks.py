"""Run a function on several gloo processes, one thread each; return results or the first error."""

from __future__ import annotations

import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from opensora_sp.parallel import closing_process_group

HOST = "127.0.0.1"
PORTS = range(20_000, 29_000)
HELPERS = Path(__file__).parent
_starting = threading.Lock()


def free_port() -> int:
    """A free port that nobody else will take: each call on this machine returns another one.

    Ports that the system chooses (from 32768 on) would not do. It gives them to the next that asks,
    such as a rank that waits for gloo's connections.
    """
    with (Path(tempfile.gettempdir()) / f"opensora_sp_port_{os.getuid()}").open("a+") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        last.seek(0)
        port = int(last.read() or PORTS[0])
        while True:
            port = PORTS[(PORTS.index(port) + 1) % len(PORTS)]
            with suppress(OSError), socket.socket() as probe:
                probe.bind(("", port))
                break

        last.truncate(0)
        last.write(str(port))
    return port


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 240
) -> list[Any]:
    """``[function(*args) of rank 0, of rank 1, ...]``.

    ``function`` must be importable and its result picklable.

    All ranks of a test session are forked from one warm process (``warm.py``). A fork costs
    milliseconds, as a pool of living ranks would, but nothing that a test changes in its ranks
    (modules, environment, torch's settings) reaches the next test.

    The store of the rendezvous lives here, on a port of its own choosing, and each process has a
    pipe of its own. So nobody takes the port in between, a process that exits first takes nothing
    with it, and one that dies is noticed. After ``timeout`` seconds the stacks of all processes are
    raised.
    """
    context = warm_context()
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    folder = tempfile.TemporaryDirectory()
    stacks = Path(folder.name)
    # As bytes: tensors would be sent as open files, of which few can be.
    work = pickle.dumps((function, args))
    workers: dict[Connection, Any] = {}
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_worker, args=(rank, num_ranks, store.port, theirs, stacks, work), daemon=True
        )
        process.start()
        theirs.close()  # then the end of the process is the end of the pipe
        workers[ours] = process

    try:
        return _collect(list(workers), list(workers.values()), stacks, timeout)
    finally:
        for process in workers.values():
            process.join(timeout=20)
            process.kill()
        folder.cleanup()


def warm_context() -> Any:
    """Start the process that ranks are forked from, unless it is running."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    path = os.pathsep.join([str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with _starting, mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return context


def run_together(
    num_ranks: int, functions: Iterable[Callable[[], Any]], at_once: int = 4
) -> dict[str, list[Any]]:
    """``run_ranks(num_ranks, function)`` of each, by its name: for functions that mostly wait."""
    functions = list(functions)
    with ThreadPoolExecutor(at_once) as pool:
        results = pool.map(partial(run_ranks, num_ranks), functions)
        return {function.__name__: of_ranks for function, of_ranks in zip(functions, results)}


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
            os.kill(process.pid, signal.SIGUSR2)
    time.sleep(2)
    for process in processes:
        process.kill()
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(stacks.iterdir()))


def fork_ranks(
    num_ranks: int,
    outputs: Sequence[Path],
    environment: dict[str, str],
    function: Callable[..., Any],
    *args: Any,
    context: Any = None,
) -> list[Any]:
    """Start ``function(*args)`` on ranks, forked from the warm process; returns the processes.

    Args:
        outputs: files to which stdout and stderr are appended; "{rank}" in their names is replaced.
        environment: variables of all ranks.
        context: of ``multiprocessing``, by default that of the warm process.
    """
    context, work = context or warm_context(), pickle.dumps((function, args))
    processes = []
    for rank in range(num_ranks):
        files = [str(path).replace("{rank}", str(rank)) for path in outputs]
        arguments = (rank, num_ranks, files, environment, work)
        # No daemon, which could not start workers of a loader.
        processes.append(context.Process(target=_begin, args=arguments, daemon=False))
        processes[-1].start()
    return processes


def _begin(
    rank: int, num_ranks: int, outputs: list[str], environment: dict[str, str], work: bytes
) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        # Ranks append to one file, as they do to one terminal.
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)

    become_rank(rank, num_ranks, **environment)
    function, args = pickle.loads(work)
    function(*args)


def become_rank(rank: int, num_ranks: int, **environment: str) -> None:
    """Set up this fork of the warm process as where a launcher has started the rank."""
    # Ignored in what a shell starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    # From a forkserver, workers of loaders import again.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(environment, OMP_NUM_THREADS="1")


def torchrun_environment(port: int) -> dict[str, str]:
    """Variables by which ``torchrun`` states the store's address, here a local port."""
    return {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _worker(
    rank: int, num_ranks: int, port: int, pipe: Connection, stacks: Path, work: bytes
) -> None:
    stack = (stacks / f"rank {rank}").open("w")
    faulthandler.register(signal.SIGUSR2, file=stack)
    become_rank(rank, num_ranks)

    try:
        store = dist.TCPStore(HOST, port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        with closing_process_group():
            function, args = pickle.loads(work)
            value = function(*args)
            # As bytes: this process ends before shared memory would be read.
            pipe.send((None, pickle.dumps(value)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
