"""A record of what the sequence-parallel collectives send."""

from __future__ import annotations

from collections import Counter
from types import TracebackType

import torch

_open: list[CommLedger] = []


class CommLedger:
    """Counts collectives and the elements this rank sends to others, while it is entered.

    ``calls`` and ``elements`` are keyed by (kind, phase): kind "switch" or "gather", phase "forward", "recompute"
    (forward run again under gradient checkpointing) or "backward".
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.elements: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> CommLedger:
        _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _open.remove(self)


def record(kind: str, *, backward: bool, elements: int) -> None:
    """Note one collective in every ledger that is open."""
    in_backward_pass = torch._C._current_graph_task_id() != -1  # no public call tells that autograd is running
    phase = "backward" if backward else "recompute" if in_backward_pass else "forward"
    for ledger in _open:
        ledger.calls[kind, phase] += 1
        ledger.elements[kind, phase] += elements
