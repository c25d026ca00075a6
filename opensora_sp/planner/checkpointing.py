"""``grad_checkpoint="auto"``: the least recomputation with which a batch fits into memory.

All blocks keep the same stages of ``models/recompute.py``, and the first ones a stage more, as far
as the planner's estimate of the peak stays below the budget. Only where recomputing everything does
not fit do the inputs of the last blocks, of as few as possible, go to the host. The choice depends
on the config, the batch's shape and the device's memory alone, so all ranks choose alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

from opensora_sp.models.recompute import EVERYTHING, OFFLOADED, STAGES, page_sizes
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.options import Options
from opensora_sp.parallel.strategies import strategy_for

from .trace import Activations

LEVELS = tuple(range(OFFLOADED, EVERYTHING + 1))
COMPILED_LEVELS = (OFFLOADED, 0, EVERYTHING)
"""Compiled blocks keep all or nothing: levels in between need to see each operator."""

STAGE_PRODUCTS = (8, 0, 0, 6, 6, 8)
"""Matrix products of a block that each of ``STAGES`` computes, in C^2 a token."""

FRAGMENTED = 0.05  # of a device's memory
RESERVED = 3e9  # bytes of the CUDA context and of NCCL


def budget_of(memory: float) -> float:
    """Bytes of a device that a step may take, of all that it has."""
    return (1 - FRAGMENTED) * memory - RESERVED


def memory_for(needed: float) -> float:
    """Bytes of the smallest device on which a step may take so many: inverse of ``budget_of``."""
    return (needed + RESERVED) / (1 - FRAGMENTED)


def choose_levels(
    needed: Callable[[Sequence[int]], float],
    budget: float,
    num_blocks: int,
    levels: Sequence[int] = LEVELS,
) -> list[int]:
    """The level of each block: the highest that fit, or the lowest for all if nothing does.

    Args:
        needed: bytes that a step takes with these levels of the blocks; grows with them.
        levels: to choose from, in ascending order.
    """

    def at(position: int) -> list[int]:
        index, ahead = divmod(position, num_blocks)
        higher = levels[min(index + 1, len(levels) - 1)]
        return [higher] * ahead + [levels[index]] * (num_blocks - ahead)

    positions = range((len(levels) - 1) * num_blocks + 1)
    fitting = bisect_right(positions, budget, key=lambda position: needed(at(position)))
    return at(max(0, fitting - 1))


def mixed(traced: Callable[[int], Activations], levels: Sequence[int]) -> Activations:
    """Activations of a model of these blocks, traced on models whose blocks are all alike."""
    shares = {level: count / len(levels) for level, count in Counter(levels).items()}
    alike = {level: traced(level) for level in shares}
    lowest = alike[min(shares)]  # it recomputes the largest part of a block at once
    return Activations(
        first=lowest.first,
        pair=sum(share * alike[level].pair for level, share in shares.items()),
        inputs=lowest.inputs,
        largest=max(traced_alike.largest for traced_alike in alike.values()),
    )


def pinned_bytes(
    levels: Sequence[int], shape: BatchShape, options: Options, ranks: int, element_size: int
) -> int:
    """Bytes of whole pages in which the busiest of ``ranks`` keeps inputs of blocks on the host."""

    def input_bytes(tokens: int) -> int:
        return sum(page_sizes(tokens * shape.width * element_size))

    layouts = shape.of_blocks(strategy_for(shape, options, ranks).token_layouts(shape))
    tokens_of_ranks = zip(*(shape.entries(layout, ranks) for layout in layouts), strict=True)
    pair_bytes = max(sum(map(input_bytes, pair)) for pair in tokens_of_ranks)
    return pair_bytes * shape.depth * levels.count(OFFLOADED) // len(levels)


def recomputed_share(levels: Sequence[int]) -> float:
    """The share of all blocks' matrix products that backward computes again."""
    repeated = [sum(STAGE_PRODUCTS[max(0, level) :]) for level in levels]
    return sum(repeated) / len(levels) / sum(STAGE_PRODUCTS)


def describe(levels: Sequence[int]) -> str:
    """The activations that blocks keep, for the log and the planner's table."""
    num_blocks, lowest, highest = len(levels), min(levels), max(levels)
    if lowest == EVERYTHING:
        return "nothing is recomputed"
    if lowest == OFFLOADED:
        number = levels.count(OFFLOADED)
        return f"inputs of {number} of {num_blocks} blocks are kept in pinned host memory"
    kept = ", ".join(STAGES[:lowest]) or "nothing but the input"
    text = f"each of {num_blocks} blocks keeps {kept}"
    if highest == lowest:
        return text

    more = "everything" if highest == EVERYTHING else ", ".join(STAGES[lowest:highest])
    return f"{text}; {levels.count(highest)} of them {'also ' * (highest < EVERYTHING)}{more}"
