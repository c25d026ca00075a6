"""The probe that the doctor runs on every rank: latency and bandwidth of collectives, checked.

``torchrun ... -m opensora_sp.runtime.doctor.probe``; rank 0 writes one line, ``PREFIX`` and JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.common.console import report_errors
from opensora_sp.parallel import closing_process_group
from opensora_sp.runtime.environment import Launch
from opensora_sp.runtime.host_checks import use_device
from opensora_sp.runtime.process_group import start_process_group
from opensora_sp.runtime.rendezvous import JOIN_TIMEOUT, join_rendezvous, raise_on_all_ranks

PREFIX = "opensora_sp probe: "
TIMEOUT = 40.0  # seconds, of the rendezvous and of each collective
NUM_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}  # float32 numbers that a rank sends
ROUND_TRIPS, TRANSFERS = 20, 5


def main() -> None:
    """Measure, as one of the ranks that torchrun started."""
    launch = Launch.read()
    if launch is None:
        raise ValueError(
            "got no launcher; expected torchrun; run opensora-sp doctor, which starts this"
        )

    measured, _ = measure_with_all_ranks(launch, None)
    if launch.rank == 0:
        sys.stdout.write(PREFIX + json.dumps(measured) + "\n")
        sys.stdout.flush()


def measure_with_all_ranks(launch: Launch, report: Any) -> tuple[dict[str, Any], list[Any]]:
    """Join the other ranks; returns what they ``measure`` and the reports of all. Collective.

    Raises:
        ValueError: on every rank, if the ranks cannot start together.
    """
    os.environ.setdefault(JOIN_TIMEOUT, str(TIMEOUT))
    with raise_on_all_ranks():
        device, backend = use_device(launch.local_rank)
    rendezvous = join_rendezvous()
    start_process_group(rendezvous, backend, device, timedelta(seconds=TIMEOUT))
    with closing_process_group():
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
    one = torch.ones(1, device=device)
    round_trip = _slowest_seconds(lambda: dist.all_reduce(one.fill_(1.0)), ROUND_TRIPS, device)

    # Rank r sends 1000 r + q to rank q.
    part = NUM_ELEMENTS[device.type] // ranks
    numbers = torch.arange(ranks, dtype=torch.float32, device=device).repeat_interleave(part)
    sent, expected = 1000 * rank + numbers, 1000 * numbers + rank
    received = torch.empty_like(sent)
    transfer = _slowest_seconds(lambda: dist.all_to_all_single(received, sent), TRANSFERS, device)

    if one.item() != ranks or not torch.equal(received, expected):
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


if __name__ == "__main__":
    with report_errors():
        main()
