"""Communication: bytes that ranks send in one forward and backward pass, as a ``CommLedger`` counts
them, and the memory of NCCL's communicators.

The comparison of shapes before each forward ("check", 16 bytes) and ZeRO's own traffic are left
out.
"""

from __future__ import annotations

from dataclasses import dataclass

from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.options import Options
from opensora_sp.parallel.rank_groups import groups_with, nested_groups
from opensora_sp.parallel.strategies import Strategy, strategy_for


@dataclass(frozen=True)
class Traffic:
    """Bytes that each rank sends to others, in forward, recomputation and backward."""

    forward: list[int]
    recompute: list[int]
    backward: list[int]

    @property
    def per_rank(self) -> list[int]:
        return [sum(phases) for phases in zip(self.forward, self.recompute, self.backward)]

    @property
    def mean(self) -> float:
        return sum(self.per_rank) / len(self.per_rank)

    @property
    def busiest(self) -> int:
        return max(self.per_rank)


def traffic(
    shape: BatchShape,
    options: Options,
    ranks: int,
    *,
    element_size: int,
    checkpointing: bool,
    training: bool,
) -> Traffic:
    """Bytes sent for one micro-batch; for sampling forward alone, without the gathered output."""
    strategy = strategy_for(shape, options, ranks)
    nothing = [0] * ranks
    forward, backward = nothing, nothing
    for exchange in strategy.exchanges(shape, options, element_size):
        sent = exchange.sent(shape, ranks)
        forward = [a + b for a, b in zip(forward, sent.forward, strict=True)]
        backward = [a + b for a, b in zip(backward, sent.backward, strict=True)]

    if not training:
        return Traffic(forward, nothing, nothing)
    resends = checkpointing and strategy.resends(options)
    return Traffic(forward, forward if resends else nothing, backward)


def output_gather(
    shape: BatchShape, strategy: type[Strategy], ranks: int, token_bytes: int
) -> list[int]:
    """Bytes each rank sends to give all others the output of its tokens, as sampling does."""
    tokens_of_ranks = shape.entries(shape.of_blocks(strategy.token_layouts(shape))[-1], ranks)
    return [tokens * (ranks - 1) * token_bytes for tokens in tokens_of_ranks]


# Communicators


GPUS_OF_NODE = 8
"""GPUs of a node whose size is not known."""

BYTES_OF_PEER = 3.28e9 / 7
"""Bytes that NCCL takes on a GPU for each other GPU of a communicator on the same node.

Reported for an all-to-all of 8 H100: 3.28 GB after the first one, in buffers of 32 channels for
each peer (https://github.com/NVIDIA/nccl/issues/1685). GPUs with slower links have fewer channels.
Peers on other nodes share one buffer, which is not counted.
"""


def communicators(world_size: int, ranks_per_node: int) -> list[int]:
    """Bytes of NCCL's communicators on the rank of a nested family that has the most of them.

    The largest group's is the first. The planner's reserve stands for it (``memory.RESERVED``), and
    a step may not take the others.
    """
    family = nested_groups(world_size, ranks_per_node)
    by_rank = []
    for rank in range(world_size):
        # Peers on other nodes share one buffer.
        peers = [min(group.size, ranks_per_node) - 1 for group in groups_with(rank, family)]
        by_rank.append([round(number * BYTES_OF_PEER) for number in peers if number > 0])
    return max(by_rank, key=sum)
