"""Communicators of the groups that ``sp_size="auto"`` makes, and the GPU memory that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opensora_sp.rank_groups import RankGroup, groups_with, nested_groups

BYTES_OF_PEER = 3.28e9 / 7
"""Bytes that NCCL takes on a GPU for each other GPU of a communicator on the same node.

Reported for an all-to-all of 8 H100: 3.28 GB after the first one, in buffers of 32 channels for
each peer (https://github.com/NVIDIA/nccl/issues/1685). GPUs with slower links have fewer channels.
Peers on other nodes share one buffer, which is not counted.
"""


@dataclass(frozen=True)
class Communicators:
    """NCCL's communicators of the rank with the most: their sizes, and their bytes together."""

    sizes: list[int]
    memory: float

    def describe(self) -> str:
        """For the planner's table."""
        sizes = ", ".join(map(str, self.sizes)) or "none"
        return (
            f"groups of several ranks that a rank is in: {sizes}; their communicators take about "
            f"{self.memory / 1e9:.1f} GB of its GPU"
        )


def communicators(world_size: int, ranks_per_node: int) -> Communicators:
    """Those of a nested family on so many ranks."""
    family = nested_groups(world_size, ranks_per_node)
    found = []
    for rank in range(world_size):
        own = groups_with(rank, family)
        sizes = [group.size for group in own if group.size > 1]
        found.append(Communicators(sizes, communicator_memory(own, ranks_per_node)))
    return max(found, key=lambda one: one.memory)


def communicator_memory(groups: Sequence[RankGroup], ranks_per_node: int) -> float:
    """Bytes of a rank's communicators, one for each of these groups that it is in."""
    peers = sum(min(group.size, ranks_per_node) - 1 for group in groups)
    return peers * BYTES_OF_PEER
