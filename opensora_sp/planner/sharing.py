"""How ranks share a batch: the strategy and its reason, units held by each rank, balance.

Strategies, layouts and costs are those of ``opensora_sp.parallel``; nothing of them is computed
anew here.

Legend: B samples, T frames, S patches, C hidden width, H heads, P ranks of one SP group.
"""

from __future__ import annotations

from dataclasses import dataclass

from opensora_sp.parallel import Options
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import attention_flops, block_flops
from opensora_sp.parallel.layout import unit_name, unit_ranges
from opensora_sp.parallel.strategies import (
    REPLICATED,
    BlockLayouts,
    Strategy,
    WholeSamples,
    strategy_for,
)


@dataclass(frozen=True)
class Sharing:
    """Who holds what under one strategy.

    ``moves`` is what is sent in place of whole tokens (``Strategy.moves``). ``units`` are counts
    per rank by kind of unit; ``work`` is relative forward work per rank, 1 the mean; ``imbalance``
    is how much longer the busiest rank works than the mean, 0.25 for a quarter.
    """

    strategy: str
    why: str
    moves: str | None
    units: dict[str, list[int]]
    tokens: list[int]
    work: list[float]
    imbalance: float
    idle: list[str]


def sharing_of(shape: BatchShape, options: Options, ranks: int) -> Sharing:
    """How ``ranks`` share a batch."""
    strategy = strategy_for(shape, options, ranks)
    tokens = shape.of_blocks(strategy.token_layouts(shape))
    attention = shape.of_blocks(strategy.attention_layouts(shape))
    layouts = [one for one in dict.fromkeys((*attention, *tokens)) if one != REPLICATED]
    units = {unit_name(layout): shape.units(layout, ranks) for layout in layouts}

    work = _work(shape, strategy, ranks)
    mean = sum(work) / ranks
    return Sharing(
        strategy=strategy.label,
        why=strategy.reason(shape, options, ranks),
        moves=strategy.moves,
        units=units,
        tokens=shape.entries(tokens[-1], ranks),
        work=[one / mean for one in work],
        imbalance=max(work) / mean - 1,
        idle=[_idle(what, sizes) for what, sizes in units.items() if min(sizes) == 0],
    )


def busiest_work(shape: BatchShape, options: Options, ranks: int) -> float:
    """FLOPs of a forward pass through the blocks on the rank that has most of them."""
    return shape.depth * max(_work(shape, strategy_for(shape, options, ranks), ranks))


def attention_work(shape: BatchShape) -> float:
    """FLOPs of one spatial and one temporal attention, the whole batch."""
    return sum(_attention(shape, WholeSamples.attention_layouts(shape), 1))


def _work(shape: BatchShape, strategy: type[Strategy], ranks: int) -> list[float]:
    """FLOPs of a spatial and a temporal block on each rank."""
    work = _attention(shape, strategy.attention_layouts(shape), ranks)
    for layout in shape.of_blocks(strategy.token_layouts(shape)):
        held = shape.entries(layout, ranks)
        work = [one + block_flops(n, shape.width) for one, n in zip(work, held, strict=True)]
    return work


def _attention(shape: BatchShape, layouts: BlockLayouts, ranks: int) -> list[float]:
    """FLOPs of a spatial and a temporal attention on each rank."""
    T, S = shape.frames, shape.patches
    spatial, temporal = [S] * T, [T] * S
    if shape.full:
        spatial = temporal = [T * S]
    elif shape.windows is not None:
        temporal = [size * T for size in shape.windows.sizes]

    lengths = zip(layouts, (spatial, temporal), strict=True)
    work = [_attention_in(shape, *one, ranks) for one in shape.of_blocks([*lengths])]
    return [sum(of_rank) for of_rank in zip(*work, strict=True)]


def _attention_in(shape: BatchShape, layout: str, lengths: list[int], ranks: int) -> list[float]:
    """FLOPs on each rank of the attention within groups of these lengths, of each sample."""
    B, C = shape.num_samples, shape.width
    of_sample = sum(attention_flops(1, length, C) for length in lengths)
    if layout == REPLICATED:
        return [B * of_sample] * ranks

    unit_axes = layout.partition("|")[0].split()
    if set(unit_axes) <= {"b", "h"}:  # units are alike: whole samples, or heads of them
        units = shape.units(layout, ranks)
        return [B * of_sample * n / sum(units) for n in units]

    heads = shape.heads if "h" in unit_axes else 1
    of_units: list[float] = []
    for length in lengths:
        of_units += [attention_flops(1, length, C // heads)] * heads
    of_units *= B
    held = unit_ranges(shape.axes, layout, ranks)
    return [sum(of_units[first:last]) for first, last in held]


def _idle(what: str, sizes: list[int]) -> str:
    without = [rank for rank, size in enumerate(sizes) if size == 0]
    listed = ", ".join(map(str, without[:8])) + (", ..." if len(without) > 8 else "")
    return (
        f"{what} are {sum(sizes)}, fewer than the {len(sizes)} ranks: {len(without)} of these hold "
        f"no unit and wait (rank {listed})"
    )
