"""The probe that the doctor runs on every rank: latency and bandwidth of collectives, checked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.parallel import closing_process_group
from opensora_sp.runtime.rendezvous import (
    JOIN_TIMEOUT,
    join_rendezvous,
    raise_on_all_ranks,
    start_process_group,
)
from opensora_sp.runtime.watchdog import Watchdog

TIMEOUT = 40.0  # seconds, of the rendezvous and of each collective
NUM_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}  # float32 numbers that a rank sends
ROUND_TRIPS, TRANSFERS = 20, 5


def measure_once(pipe: Connection) -> None:
    """As one of ``LocalRanks``: rank 0 answers with ("measured", what ``measure`` returns)."""
    pipe.recv()
    measured, _ = measure_with_all_ranks(None)
    if os.environ["RANK"] == "0":
        pipe.send(("measured", measured))
    with suppress(EOFError):
        pipe.recv()


def measure_with_all_ranks(report: Any) -> tuple[dict[str, Any], list[Any]]:
    """Join the other ranks; returns what they ``measure`` and the reports of all. Collective.

    Raises:
        ValueError: on every rank, if the ranks cannot start together.
    """
    os.environ.setdefault(JOIN_TIMEOUT, str(TIMEOUT))
    with raise_on_all_ranks():
        pass
    store = join_rendezvous()
    with closing_process_group(), Watchdog(store, peer_timeout=TIMEOUT, grace_time=0):
        device = start_process_group(store, timeout=timedelta(seconds=TIMEOUT), alone=True)
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
        return measure(device), reports


def measure(device: torch.device) -> dict[str, Any]:
    """Latency of an all-reduce and bandwidth of an all-to-all, of the slowest rank. Collective.

    Returns:
        Seconds of the ``round_trip``; ``rate`` in bytes per second from each rank to all others,
        and the ``bytes`` of one transfer; ``ranks`` and ``backend``.

    Raises:
        ValueError: if other numbers arrive than were sent.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    backend = dist.get_backend()
    flag = torch.ones(1, device=device)
    round_trip = _slowest_seconds(lambda: dist.all_reduce(flag.fill_(1.0)), ROUND_TRIPS, device)

    # Rank r sends 1000 r + q to rank q.
    part = NUM_ELEMENTS[device.type] // ranks
    numbers = torch.arange(ranks, dtype=torch.float32, device=device).repeat_interleave(part)
    sent, expected = 1000 * rank + numbers, 1000 * numbers + rank
    received = torch.empty_like(sent)
    transfer = _slowest_seconds(lambda: dist.all_to_all_single(received, sent), TRANSFERS, device)

    if flag.item() != ranks or not torch.equal(received, expected):
        raise ValueError(
            f"got other numbers on rank {rank} than were sent; expected the same; the network or "
            "its driver is broken: try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1"
        )

    num_bytes = sent.element_size() * part * (ranks - 1)
    return {
        "ranks": ranks,
        "backend": backend,
        "round_trip": round_trip,
        "bytes": num_bytes,
        "rate": num_bytes / transfer,
    }


def _slowest_seconds(collective: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median time of a collective on the slowest rank."""
    seconds = median_seconds(collective, repeats, device)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def median_seconds(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median time of some runs, after two runs of warm-up."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])
