"""What the doctor lets every rank run: a round trip between all of them and what they carry, checked and timed.

``torchrun ... -m opensora_sp.runtime.doctor.probe``; rank 0 writes one line of JSON, which begins with ``MARK``.
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

from opensora_sp.console import report_errors
from opensora_sp.parallel import shutdown_process_group
from opensora_sp.runtime.environment import Launch
from opensora_sp.runtime.host_checks import check_machine
from opensora_sp.runtime.rendezvous import join_rendezvous

MARK = "opensora_sp probe: "
SECONDS = 40.0  # to meet, and for any one collective
NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 24}  # float32 that a rank holds
TRIPS, TRANSFERS = 20, 5


def main() -> None:
    """Measure, as one rank of those that torchrun started."""
    launch = Launch.read()
    if launch is None:
        raise ValueError(
            "got no launcher; expected torchrun; run opensora-sp doctor, which starts this"
        )
    os.environ.setdefault("OPENSORA_SP_JOIN_TIMEOUT", str(SECONDS))
    check_machine(launch)
    store = join_rendezvous()
    device = (
        torch.device("cuda", launch.local_rank)
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=SECONDS)
    )
    del store
    measured = measure(device)
    if launch.rank == 0:
        sys.stdout.write(MARK + json.dumps(measured) + "\n")
        sys.stdout.flush()
    shutdown_process_group()


def measure(device: torch.device) -> dict[str, Any]:
    """Round trip in seconds and bytes a second that each rank sends to all others, of the slowest rank. Collective.

    Raises:
        ValueError: if what arrives is not what was sent.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    one = torch.ones(1, device=device)
    trip = _timed(lambda: dist.all_reduce(one.fill_(1.0)), TRIPS, device)
    part = NUMBERS[device.type] // ranks
    sent = (
        torch.arange(ranks, dtype=torch.float32, device=device).repeat_interleave(part)
        + 1000 * rank
    )
    received = torch.empty_like(sent)
    transfer = _timed(lambda: dist.all_to_all_single(received, sent), TRANSFERS, device)
    wanted = (
        torch.arange(ranks, dtype=torch.float32, device=device).repeat_interleave(part) * 1000
        + rank
    )
    if one.item() != ranks or not torch.equal(received, wanted):
        raise ValueError(
            f"got other numbers on rank {rank} than were sent; expected the same; the network or its driver is broken: "
            "try NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1"
        )
    carried = 4 * part * (ranks - 1)
    backend = dist.get_backend()
    return {
        "ranks": ranks,
        "backend": backend,
        "round_trip": trip,
        "bytes": carried,
        "rate": carried / transfer,
    }


def _timed(collective: Callable[[], Any], times: int, device: torch.device) -> float:
    """Median seconds of a collective on the slowest rank, after two that do not count."""
    seconds = []
    for _ in range(times + 2):
        start = time.perf_counter()
        collective()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(median(seconds[2:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    with report_errors():
        main()
