"""What a check of a device measures, and the bound that it must meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from opensora_sp.models.kernels.verification import first_line

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
        """Of a check that raised."""
        return cls(name, note=first_line(error))

    def to_dict(self) -> dict[str, Any]:
        """JSON values; numbers that JSON lacks (NaN, infinity) become text."""
        fields = asdict(self) | {"verdict": self.verdict}
        if self.got is not None and not math.isfinite(self.got):
            fields["got"] = str(self.got)
        return fields


def findings_of(
    name: str, check: Callable[[Setup], Iterator[Finding]], setup: Setup
) -> Iterator[Finding]:
    """The findings of a check, the last of which may be an error that it raised."""
    try:
        yield from check(setup)
    # Drivers and compilers may raise anything.
    except Exception as error:
        yield Finding.of_error(name, error)


def relative_errors(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative errors of L2 norms of several tensors, by name, in float64 on the host."""
    norms = {name: tensor.double().norm().item() for name, tensor in exact.items()}
    floor = NOISE_FLOOR * max(norms.values())
    errors = {}
    for name, tensor in exact.items():
        difference = ours[name].double().cpu() - tensor.double().cpu()
        errors[name] = difference.norm().item() / (max(norms[name], floor) or 1.0)
    return errors


def largest_of(errors: Mapping[str, float]) -> tuple[float, str]:
    """The largest error and its name. NaN exceeds any number."""
    name = max(errors, key=lambda n: math.inf if math.isnan(errors[n]) else errors[n])
    return errors[name], name
