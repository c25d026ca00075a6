"""How long a GPU works on the programs of a kernel, some of which run at a time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def end_of(programs: Iterable[int], slots: int) -> int:
    """When the last of the programs ends, each of which starts in the slot that is free first.

    `programs`: how long each takes, in the order in which they start.
    """
    ends = [0] * slots
    for duration in programs:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)
