"""All checks of a device, one after the other; a failure does not stop the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from opensora_sp.runtime.rank_info import versions

from .findings import Finding, Setup, findings_of
from .one_device import (
    KERNEL_CHECKS,
    MODEL_CHECKS,
    check_attention,
    check_ceilings,
    check_compiled,
)
from .ranks import check_ranks

# In the order in which they run, quick ones first.
CHECKS: dict[str, Callable[[Setup], Iterator[Finding]]] = {
    "ceilings": check_ceilings,
    "attention": check_attention,
    **MODEL_CHECKS,
    **KERNEL_CHECKS,
    "ranks": check_ranks,
    "compiled blocks": check_compiled,
}


@dataclass
class Examination:
    """What the checks of a device found, so far.

    Attributes:
        seconds: that all checks took.
        complete: whether all checks have run.
    """

    device: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False

    @property
    def ok(self) -> bool:
        return self.complete and all(finding.verdict != "FAIL" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "facts": versions(),
            "findings": [finding.to_dict() for finding in self.findings],
            "seconds": round(self.seconds, 2),
            "complete": self.complete,
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


def examine_device(
    setup: Setup, report: Callable[[Examination], None] = lambda examination: None
) -> Examination:
    """Run all checks; an error in one is a finding, and the next one runs.

    Args:
        report: called with what was found so far, after each finding, which is the last.
    """
    examination, start = Examination(setup.name), time.perf_counter()
    for name, check in CHECKS.items():
        for finding in findings_of(name, check, setup):
            examination.findings.append(finding)
            examination.seconds = time.perf_counter() - start
            report(examination)
    examination.complete = True
    return examination
