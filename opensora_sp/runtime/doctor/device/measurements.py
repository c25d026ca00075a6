"""What a check of a device measures, and the bound that it must meet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Verdict = Literal["ok", "FAIL", "skip"]

# A gradient that is zero but for rounding counts as this part of the largest one, as in
# verify_step.
NOISE_FLOOR = 1e-3


@dataclass(frozen=True)
class Setup:
    """Where the checks run; ``small`` sizes take a CPU seconds."""

    device: torch.device
    num_ranks: int
    small: bool = False

    @property
    def name(self) -> str:
        """The devices, for a heading."""
        if self.device.type == "cpu":
            return f"CPU, {self.num_ranks} ranks"
        return f"{self.num_ranks} x {torch.cuda.get_device_name(self.device)}"


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        got: the measured number; None after an error or a skip.
        bound: the largest ``got`` that passes, or the smallest with ``at_least``.
        note: details: the worst parameter, the reason of a skip, the error.
    """

    name: str
    got: float | None = None
    bound: float | None = None
    unit: str = ""
    at_least: bool = False
    note: str = ""
    skipped: bool = False

    @property
    def verdict(self) -> Verdict:
        if self.skipped:
            return "skip"
        if self.got is None or self.bound is None or not math.isfinite(self.got):
            return "FAIL"
        passes = self.got >= self.bound if self.at_least else self.got <= self.bound
        return "ok" if passes else "FAIL"

    @classmethod
    def skip(cls, name: str, reason: str) -> Finding:
        return cls(name, note=reason, skipped=True)

    @classmethod
    def of_error(cls, name: str, error: BaseException) -> Finding:
        """Of a check that raised: the first line of its error, since messages of CUDA are pages."""
        lines = str(error).splitlines()
        return cls(name, note=f"{type(error).__name__}: {lines[0] if lines else ''}")

    def to_dict(self) -> dict[str, Any]:
        """JSON values; numbers that JSON lacks (NaN, infinity) become text."""
        fields = asdict(self) | {"verdict": self.verdict}
        if self.got is not None and not math.isfinite(self.got):
            fields["got"] = str(self.got)
        return fields


def relative_error(ours: Tensor, exact: Tensor, floor: float = 0.0) -> float:
    """``|ours - exact| / max(|exact|, floor)`` of L2 norms, in float64 on the host."""
    exact = exact.detach().double().cpu()
    difference: float = (ours.detach().double().cpu() - exact).norm().item()
    scale = max(exact.norm().item(), floor)
    return difference / scale if scale else difference


def relative_errors(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative errors of several tensors, by name."""
    largest = max((tensor.double().norm().item() for tensor in exact.values()), default=0.0)
    floor = NOISE_FLOOR * largest
    return {name: relative_error(ours[name], tensor, floor) for name, tensor in exact.items()}


def largest_of(errors: Mapping[str, float]) -> tuple[float, str]:
    """The largest error and its name. NaN exceeds any number."""
    name = max(errors, key=lambda n: math.inf if math.isnan(errors[n]) else errors[n])
    return errors[name], name
