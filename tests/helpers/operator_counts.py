"""Counts of the operators that a model runs, forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from parity_cases import Case, make_inputs
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(model: torch.nn.Module, case: Case) -> Counter[str]:
    """Operators of a pass over a case's batch."""
    inputs = make_inputs(case)
    with Operators() as seen:
        model(**inputs).sum().backward()
    return seen.counts
