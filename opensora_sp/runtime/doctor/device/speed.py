"""Ceilings: bandwidth of copies, and throughput of a matrix product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opensora_sp.runtime.doctor.probe import median_seconds

from .measurements import Finding, Setup

REPEATS = 5
GB, TERA = 1e9, 1e12

# Well below any healthy GPU: PCIe 3 copies 12 GB/s, an A10's memory 600, its cores multiply
# 60 TFLOP/s in practice. On CPU there is no bound.
MIN_ON_GPU = {"host to device": 4.0, "device to device": 100.0, "bf16 matrix product": 20.0}


def check_ceilings(setup: Setup) -> Iterator[Finding]:
    """Copies in GB/s (device to device: read and write), and a bf16 matrix product in TFLOP/s."""
    device, on_gpu = setup.device, setup.device.type == "cuda"
    num_bytes, side = (2**22, 256) if setup.small else (2**29, 8192)

    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    source = torch.empty_like(host, device=device)
    target = torch.empty_like(source)
    matrix = torch.ones(side, side, dtype=torch.bfloat16, device=device)

    def rate_of(work: Callable[[], Any], amount: float) -> float:
        return amount / median_seconds(work, REPEATS, device)

    rates = {
        "host to device": rate_of(lambda: source.copy_(host), num_bytes / GB),
        "device to device": rate_of(lambda: target.copy_(source), 2 * num_bytes / GB),
        "bf16 matrix product": rate_of(lambda: matrix @ matrix, 2 * side**3 / TERA),
    }
    for name, rate in rates.items():
        bound = MIN_ON_GPU[name] if on_gpu else 0.0
        unit = "TFLOP/s" if "product" in name else "GB/s"
        yield Finding(name, rate, bound, unit, at_least=True)
