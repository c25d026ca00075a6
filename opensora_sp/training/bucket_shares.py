"""What the steps of an interval of the log spend on each bucket, by predicted times."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from opensora_sp.data import Assigned, MicroBatch, ScheduledBatches
from opensora_sp.data.sampler import RankBatches, snake_order
from opensora_sp.data.schedule import Seconds
from opensora_sp.parallel import SequenceMesh
from opensora_sp.parallel.rank_groups import RankGroup

logger = logging.getLogger(__name__)
NODES = (
    "step %d: %s share a micro-batch of the bucket %s over the network, although one node can "
    "compute it: by the cost model, ranks would wait longer otherwise. More micro_batches_per_step "
    "avoid it. Later steps are not reported"
)


class BucketShares:
    """Sums over steps, equal on all ranks, since all know who computes what.

    Args:
        rank_batches: of the run. Where it schedules micro-batches on groups, a step of them that
            shares a micro-batch between nodes without need is warned of, once.
    """

    def __init__(self, mesh: SequenceMesh, rank_batches: RankBatches) -> None:
        self.mesh, self.rank_batches = mesh, rank_batches
        self._has_warned = False
        self._reset()

    def _reset(self) -> None:
        self._total = 0.0
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._idle: defaultdict[str, float] = defaultdict(float)
        self._ranks: Counter[str] = Counter()
        self._micro_batches: Counter[str] = Counter()

    def see(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Count the micro-batches of a step, if they are of buckets or scheduled on groups."""
        if isinstance(self.rank_batches, ScheduledBatches):
            assigned = self.rank_batches.assigned(step)
            self._warn_of_nodes(step, assigned, self.rank_batches.seconds)
            self._count(assigned, self.rank_batches.seconds)
        elif micro_batches[0].bucket:
            for one in rounds_of(micro_batches, self.mesh.family):
                self._count(one, lambda micro_batch, group: micro_batch.cost)

    def _count(self, assigned: Sequence[Assigned], seconds: Seconds) -> None:
        """Add micro-batches after which all ranks wait for the slowest one.

        A rank that is done earlier waits after its last micro-batch, and that one's bucket counts
        the time.
        """
        busy = np.zeros(self.mesh.world_size)
        last = [""] * self.mesh.world_size
        for micro_batch, group in assigned:
            bucket, taken = name_of(micro_batch), seconds(micro_batch, group)
            busy[group.start : group.stop] += taken
            last[group.start : group.stop] = [bucket] * group.size
            self._busy[bucket] += taken * group.size
            self._ranks[bucket] += group.size
            self._micro_batches[bucket] += 1

        for bucket, idle in zip(last, busy.max() - busy, strict=True):
            self._idle[bucket] += idle
        self._total += self.mesh.world_size * busy.max()

    def _warn_of_nodes(self, step: int, assigned: Sequence[Assigned], seconds: Seconds) -> None:
        """Warn once of a group that spans nodes although one node can compute its micro-batch."""
        if self._has_warned:
            return
        per_node = self.mesh.ranks_per_node
        within = [group for group in self.mesh.family if not group.spans_nodes(per_node)]
        for micro_batch, group in assigned:
            if not group.spans_nodes(per_node):
                continue
            if any(np.isfinite(seconds(micro_batch, one)) for one in within):
                self._has_warned = True
                logger.warning(NODES, step, group, name_of(micro_batch))
                return

    def take(self) -> dict[str, float]:
        """The numbers since the last call, for each bucket, by their names in ``metrics.jsonl``.

        "share" is that of the time in which ranks compute, "degree" the mean number of ranks of a
        micro-batch, and "idle" the share of all time that ranks wait after one.
        """
        computed = sum(self._busy.values())
        numbers: dict[str, float] = {}
        for bucket, busy in sorted(self._busy.items(), key=lambda one: -one[1]):
            numbers[f"share/{bucket}"] = busy / computed
            numbers[f"degree/{bucket}"] = self._ranks[bucket] / self._micro_batches[bucket]
            numbers[f"idle/{bucket}"] = self._idle[bucket] / self._total
        self._reset()
        return numbers


def describe_shares(numbers: Mapping[str, float | None]) -> str:
    """The numbers of ``BucketShares.take`` on one line, the largest shares first."""
    parts = []
    for name, share in numbers.items():
        kind, _, bucket = name.partition("/")
        if kind == "share":
            degree, idle = numbers[f"degree/{bucket}"], numbers[f"idle/{bucket}"]
            parts.append(f"{bucket}: {share:.1%} on {degree:.2g} ranks, idle {idle:.1%}")
    return "buckets by predicted time: " + "; ".join(parts)


def name_of(micro_batch: MicroBatch) -> str:
    """The bucket of a micro-batch; without buckets its frames and size."""
    frames, height, width = micro_batch.shape
    return micro_batch.bucket or f"{frames} x {height}x{width}"


def rounds_of(
    micro_batches: Sequence[MicroBatch], replicas: Sequence[RankGroup]
) -> list[list[Assigned]]:
    """The rounds of a step on replicas of a fixed degree, which wait for each other in each."""
    indices = snake_order([one.cost for one in micro_batches], len(replicas))
    rounds: list[list[Assigned]] = [[] for _ in indices[0]]
    for group, own in zip(replicas, indices, strict=True):
        for number, index in enumerate(own):
            if index is not None:
                rounds[number].append(Assigned(micro_batches[index], group))
    return rounds
