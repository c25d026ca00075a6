"""All checks of a device, one after the other; a failure does not stop the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from opensora_sp.runtime.versions import versions

from .attention import check_attention
from .findings import Finding, Setup
from .kernels import KERNEL_CHECKS
from .models import MODEL_CHECKS, check_compiled
from .ranks import check_ranks
from .speed import check_ceilings

# In the order in which they run, quick ones first.
CHECKS: dict[str, Callable[[Setup], Iterator[Finding]]] = {
    "ceilings": check_ceilings,
    "attention": check_attention,
    **MODEL_CHECKS,
    **KERNEL_CHECKS,
    "ranks": check_ranks,
    "compiled blocks": check_compiled,
}


@dataclass(frozen=True)
class Examination:
    """What all checks of a device found."""

    device: str
    findings: list[Finding]
    seconds: dict[str, float]

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "FAIL" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "facts": versions(),
            "findings": [finding.to_dict() for finding in self.findings],
            "seconds": self.seconds,
            "ok": self.ok,
        }


def setup_for(device: str) -> Setup:
    """The checks' setup on "cuda" or "cpu".

    Raises:
        ValueError: if there is no such device.
    """
    if device == "cpu":
        return Setup(torch.device("cpu"), num_ranks=2, small=True)
    if not torch.cuda.is_available():
        raise ValueError(
            "got --device cuda, and torch sees no GPU; expected at least one; look at the driver "
            "and CUDA_VISIBLE_DEVICES, or pass --device cpu to run the same checks, small, on CPU"
        )
    return Setup(torch.device("cuda", 0), num_ranks=torch.cuda.device_count())


def examine_device(setup: Setup) -> Examination:
    """Run all checks; an error in one is a finding, and the next one runs."""
    findings: list[Finding] = []
    seconds: dict[str, float] = {}
    # disable=None: no bar unless this is a terminal.
    for name, check in tqdm(CHECKS.items(), desc="doctor", unit="check", disable=None):
        start = time.perf_counter()
        try:
            findings += check(setup)
        except Exception as error:  # drivers and compilers may raise anything
            findings.append(Finding.of_error(name, error))

        seconds[name] = round(time.perf_counter() - start, 2)
    return Examination(_name(setup), findings, seconds)


def _name(setup: Setup) -> str:
    if setup.device.type == "cpu":
        return f"CPU, {setup.num_ranks} ranks"
    return f"{setup.num_ranks} x {torch.cuda.get_device_name(setup.device)}"
