"""A record of what the sequence-parallel collectives send."""

from __future__ import annotations

from collections import Counter
from types import TracebackType

import torch
import torch.distributed as dist

PHASES = ("forward", "recompute", "backward")
_open: list[CommLedger] = []


class CommLedger:
    """Counts collectives, and the elements and bytes this rank sends to others, while it is entered.

    ``calls``, ``elements`` and ``bytes`` are keyed by (kind, phase). Kinds: "switch" between the layouts, "heads" for
    the exchange of queries, keys, values and outputs, "branch" for the input and output of a spatial attention,
    "tokens" where all tokens are gathered for an attention, "gather" for the output, "check" for the comparison of
    shapes, "data" for what training hands around of the clips that each rank has encoded, "clips" for what ranks agree
    on about them beforehand. Phases: "forward", "recompute" (forward run again under gradient checkpointing) and
    "backward".
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.elements: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> CommLedger:
        _open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        _open.remove(self)

    def table(self, group: dist.ProcessGroup | None = None) -> str:
        """A line for each kind and phase: collectives, elements sent and MB (1e6 bytes) sent.

        Without a group, of this rank. With a group, the mean over its ranks and the busiest one; that is collective.
        """
        own = {key: (self.calls[key], self.elements[key], self.bytes[key]) for key in self.calls}
        ranks: list[dict[tuple[str, str], tuple[int, int, int]]] = [own]
        if group is not None:
            ranks = [{} for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(ranks, own, group=group)
        lines = [
            f"{'kind':8} {'phase':10} {'calls':>6} {'elements':>14} {'MB':>10} {'busiest MB':>10}  rank"
        ]
        for kind, phase in sorted(
            {key for rank in ranks for key in rank}, key=lambda k: (k[0], PHASES.index(k[1]))
        ):
            counts = [rank.get((kind, phase), (0, 0, 0)) for rank in ranks]
            calls, elements, sent = (
                sum(column) / len(ranks) for column in zip(*counts, strict=True)
            )
            most = max(count[2] for count in counts)
            busiest = [count[2] for count in counts].index(most) if group is not None else "this"
            lines.append(
                f"{kind:8} {phase:10} {calls:6g} {elements:14.0f} {sent / 1e6:10.3f} {most / 1e6:10.3f}  {busiest}"
            )
        return "\n".join(lines)


def record(kind: str, *, backward: bool, elements: int, element_size: int) -> None:
    """Note one collective in every ledger that is open."""
    in_backward_pass = (
        torch._C._current_graph_task_id() != -1
    )  # no public call tells that autograd is running
    phase = "backward" if backward else "recompute" if in_backward_pass else "forward"
    for ledger in _open:
        ledger.calls[kind, phase] += 1
        ledger.elements[kind, phase] += elements
        ledger.bytes[kind, phase] += elements * element_size
