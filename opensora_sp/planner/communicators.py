"""Communicators of the groups that ``sp_size="auto"`` makes, and the GPU memory that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opensora_sp.parallel.rank_groups import RankGroup, groups_with, nested_groups

GPUS_OF_NODE = 8
"""GPUs of a node whose size is not known."""

BYTES_OF_PEER = 3.28e9 / 7
"""Bytes that NCCL takes on a GPU for each other GPU of a communicator on the same node.

Reported for an all-to-all of 8 H100: 3.28 GB after the first one, in buffers of 32 channels for
each peer (https://github.com/NVIDIA/nccl/issues/1685). GPUs with slower links have fewer channels.
Peers on other nodes share one buffer, which is not counted.
"""


@dataclass(frozen=True)
class Communicators:
    """NCCL's communicators of the rank with the most: their sizes, and their bytes together.

    ``beside_largest`` are the bytes of all but the largest one, for which the planner's reserve
    stands (``checkpointing.RESERVED``). A step may not take them.
    """

    sizes: list[int]
    memory: float
    beside_largest: float

    def describe(self) -> str:
        """For the planner's table."""
        sizes = ", ".join(map(str, self.sizes)) or "none"
        return (
            f"groups of several ranks that a rank is in: {sizes}; their communicators take about "
            f"{self.memory / 1e9:.1f} GB of its GPU"
        )


def communicators(world_size: int, ranks_per_node: int) -> Communicators:
    """The communicators of a nested family on so many ranks."""
    family = nested_groups(world_size, ranks_per_node)

    def of_rank(rank: int) -> Communicators:
        groups = groups_with(rank, family)
        sizes = [group.size for group in groups if group.size > 1]
        memory, smaller = (_memory(some, ranks_per_node) for some in (groups, groups[1:]))
        return Communicators(sizes, memory, smaller)

    return max(map(of_rank, range(world_size)), key=lambda rank: rank.memory)


def communicators_of(sp_size: object, world_size: int, ranks_per_node: int) -> Communicators | None:
    """The communicators of a training; None with one degree, whose only group is the largest."""
    if sp_size is None or isinstance(sp_size, int):
        return None
    return communicators(world_size, ranks_per_node)


def gpus_of_node(num_gpus: int, gpus_per_node: int | None) -> int:
    """The number of GPUs on each node; where it is not known 8, or all if they are fewer."""
    return gpus_per_node or min(num_gpus, GPUS_OF_NODE)


def _memory(groups: Sequence[RankGroup], ranks_per_node: int) -> float:
    """Bytes of a rank's communicators, one for each of these groups that it is in."""
    peers = sum(min(group.size, ranks_per_node) - 1 for group in groups)
    return peers * BYTES_OF_PEER
