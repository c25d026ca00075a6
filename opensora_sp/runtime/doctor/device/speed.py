"""Ceilings: how fast memory is copied and matrices are multiplied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from .findings import Finding, Setup

REPEATS = 5
GB, TERA = 1e9, 1e12

# Well below any GPU that is healthy: PCIe 3 copies 12 GB/s, an A10's memory 600, its cores multiply
# 60 TFLOP/s in practice. A CPU only has to run.
LEAST_ON_GPU = {"host to device": 4.0, "device to device": 100.0, "bf16 matrix product": 20.0}


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Median time of some runs, after two that do not count."""
    taken = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[2:])


def check_ceilings(setup: Setup) -> Iterator[Finding]:
    """Copies in GB/s (device to device counts a read and a write), and a bf16 matrix product in TFLOP/s."""
    device, on_gpu = setup.device, setup.device.type == "cuda"
    num_bytes, side = (2**22, 256) if setup.small else (2**29, 8192)

    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.empty_like(host, device=device)
    other = torch.empty_like(there)
    matrix = torch.ones(side, side, dtype=torch.bfloat16, device=device)
    rates = {
        "host to device": num_bytes / GB / seconds(lambda: there.copy_(host), device),
        "device to device": 2 * num_bytes / GB / seconds(lambda: other.copy_(there), device),
        "bf16 matrix product": 2 * side**3 / TERA / seconds(lambda: matrix @ matrix, device),
    }

    for name, rate in rates.items():
        least = LEAST_ON_GPU[name] if on_gpu else 0.0
        unit = "TFLOP/s" if "product" in name else "GB/s"
        yield Finding(name, rate, least, unit, at_least=True)
