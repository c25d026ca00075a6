"""Run a function on several gloo processes, one thread each, and bring its results or its first error back."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
    """``[function(*args) of rank 0, of rank 1, ...]``; ``function`` must be importable and its result picklable."""
    context = mp.get_context("spawn")
    results = context.Queue()
    port = free_port()
    workers = [
        context.Process(target=_worker, args=(rank, num_ranks, port, results, function, args), daemon=True)
        for rank in range(num_ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        outcomes = dict(_take(results, workers, timeout) for _ in workers)
    finally:
        for worker in workers:
            worker.join(timeout=20)
            worker.kill()
    return [outcomes[rank] for rank in range(num_ranks)]


def _take(results: Any, workers: list[Any], timeout: float) -> tuple[int, Any]:
    rank, error, value = results.get(timeout=timeout)
    if error:
        for worker in workers:
            worker.kill()
        raise AssertionError(f"rank {rank} failed:\n{error}")
    return rank, pickle.loads(value)


def _worker(rank: int, num_ranks: int, port: int, results: Any, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        OMP_NUM_THREADS="1",
    )
    try:
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
        value = function(*args)
        results.put((rank, None, pickle.dumps(value)))  # as bytes: this process ends before shared memory is read
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
