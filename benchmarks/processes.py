"""The processes of a benchmark: ranks of gloo with one thread each, and a time limit for all.

``BENCHMARK_TIME_LIMIT=7200 python -m benchmarks ...`` sets another limit, in seconds.
"""

import faulthandler
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from opensora_sp.parallel import shutdown_process_group


def limit_time() -> None:
    """After the limit, exit with status 1 and dump all stacks, even while the GIL is held."""
    seconds = float(os.environ.get("BENCHMARK_TIME_LIMIT", "3600"))
    faulthandler.dump_traceback_later(seconds, exit=True)


def join_ranks(rank: int, ranks: int, store: str) -> None:
    """Make this process a rank of one thread."""
    limit_time()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)


def on_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``work(*arguments)`` on new ranks; returns what rank 0 does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_run_rank, (ranks, store, results, work, arguments), nprocs=ranks)
    return results.get()


def _run_rank(
    rank: int, ranks: int, store: str, results: Any, work: Callable[..., Any], arguments: Any
) -> None:
    join_ranks(rank, ranks, store)
    result = work(*arguments)
    if rank == 0:
        results.put(result)
    shutdown_process_group()
