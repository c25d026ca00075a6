"""A communication counter: how many collectives, elements and bytes sequence parallelism sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import torch.distributed as dist

from ..typed import is_backward_running

PHASES = ("forward", "recompute", "backward")
Key: TypeAlias = tuple[str, str]

_open: list[CommLedger] = []


class CommLedger:
    """A communication counter of collectives, and of the elements and bytes sent to other ranks.

    It counts while it is entered. ``calls``, ``elements`` and ``bytes`` are keyed by (kind, phase).
    Phases are "forward", "recompute" (forward run again under gradient checkpointing) and
    "backward". Kinds:

    * "switch": tokens between the layouts
    * "heads": queries, keys, values and outputs
    * "branch": the input and output of a spatial attention
    * "tokens": all tokens, gathered for an attention
    * "gather": the output
    * "check": the comparison of inputs (``InputCheck``)
    * "data": features of the clips that each rank has encoded
    * "clips": what ranks agree on about clips beforehand
    """

    def __init__(self) -> None:
        self.calls: Counter[Key] = Counter()
        self.elements: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()

    def __enter__(self) -> CommLedger:
        _open.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _open.remove(self)

    def table(self, group: dist.ProcessGroup | None = None) -> str:
        """A line for each kind and phase: collectives, elements sent and MB (1e6 bytes) sent.

        Without a group, of this rank. With a group, the mean over its ranks and the busiest one;
        that is collective.
        """
        own = [self.calls, self.elements, self.bytes]
        ranks = [own]
        if group is not None:
            ranks = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(ranks, own, group=group)
        calls, elements, sent = zip(*ranks, strict=True)

        lines = [
            f"{'kind':8} {'phase':10} {'calls':>6} {'elements':>14} {'MB':>10} {'busiest MB':>10}"
            "  rank"
        ]
        keys: set[Key] = set().union(*calls)
        for key in sorted(keys, key=lambda key: (key[0], PHASES.index(key[1]))):
            of_ranks = [counter[key] for counter in sent]
            busiest = of_ranks.index(max(of_ranks)) if group is not None else "this"
            lines.append(
                f"{key[0]:8} {key[1]:10} {_mean(calls, key):6g} {_mean(elements, key):14.0f} "
                f"{_mean(sent, key) / 1e6:10.3f} {max(of_ranks) / 1e6:10.3f}  {busiest}"
            )
        return "\n".join(lines)


def _mean(counters: Sequence[Counter[Key]], key: Key) -> float:
    return sum(counter[key] for counter in counters) / len(counters)


def record(kind: str, *, backward: bool, elements: int, element_size: int) -> None:
    """Count one collective in every counter that is entered."""
    phase = "recompute" if is_backward_running() else "forward"
    key = kind, "backward" if backward else phase
    for counter in _open:
        counter.calls[key] += 1
        counter.elements[key] += elements
        counter.bytes[key] += elements * element_size
