"""Bytes that ranks send in one forward and backward pass, as a ``CommLedger`` counts them.

The comparison of shapes before each forward ("check", 16 bytes) and ZeRO's own traffic are left
out.
"""

from __future__ import annotations

from dataclasses import dataclass

from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.options import Options
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
