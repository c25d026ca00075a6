"""Cases of STDiT2 by default, and comparisons that count what a strategy is known to send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parity_cases import DEPTH, Case, compare_with_one_process

from opensora_sp.parallel import CommLedger, Options, SequenceMesh
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.strategies import SplitHeads

BLOCKS = DEPTH  # of a spatial and a temporal part each
CHUNKS = 2
OVERLAP = dict(overlap_backward=True, overlap_chunks=CHUNKS)


@dataclass(frozen=True)
class FamilyCase(Case):
    model: str = "STDiT2"


class Parity:
    """Compares with one process, and remembers the largest difference."""

    def __init__(self, mesh: SequenceMesh) -> None:
        self.mesh, self.worst, self.comparisons = mesh, 0.0, 0

    def check(self, case: Case, **options: Any) -> CommLedger:
        found = compare_with_one_process(case, self.mesh, **options)
        self.worst = max(self.worst, found.worst)
        self.comparisons += found.tensors
        return found.counter

    def check_switch(self, case: FamilyCase) -> None:
        """The default strategy, with the number of switches that it is known to make."""
        counter = self.check(case)
        ranks, heads = self.mesh.sp_size, case.heads
        whole_samples = case.size[0] % ranks == 0
        shape = BatchShape(case.size[0], *case.patches, 4 * heads, heads)
        by_heads = SplitHeads.applies(shape, Options(), ranks)
        switches = 0 if whole_samples or by_heads else 2 * BLOCKS - 1
        for kind, calls in [("switch", switches), ("heads", 2 * BLOCKS if by_heads else 0)]:
            assert counter.calls[kind, "forward"] == counter.calls[kind, "backward"] == calls, (
                case,
                counter.calls,
            )
        assert not [key for key in counter.calls if key[1] == "recompute"], (case, counter.calls)
        assert bool(counter.calls["gather", "forward"]) == (case.output == "full")

    def check_overlap(self, case: FamilyCase) -> None:
        """A block's second part sends its end in chunks, the first part (attention) in one."""
        counter = self.check(case, **OVERLAP)
        frames, patches = case.patches
        if (
            case.size[0] % self.mesh.sp_size
            and case.size[0] * min(frames, patches) >= CHUNKS * self.mesh.sp_size
        ):
            calls = BLOCKS + CHUNKS * (BLOCKS - 1)
            assert (
                counter.calls["switch", "forward"] == counter.calls["switch", "backward"] == calls
            ), counter.calls
        assert not [key for key in counter.calls if key[1] == "recompute"], (case, counter.calls)
