"""The parallel strategies: how the tokens of a batch are divided among ranks.

``strategy.py`` has the interface, ``IN_ORDER`` the order in which strategies are asked. A strategy
from outside is one subclass of ``Strategy``, passed to ``register_strategy``. Which one a batch
gets depends on the user's ``Options`` and on its shape alone, so all ranks choose the same.
"""

from __future__ import annotations

from dataclasses import replace

from ..batch_shape import BatchShape
from ..cost_model import best_chunks
from ..layout import SPATIAL_ROWS
from ..options import STRATEGY_OPTIONS, Options
from .heads import SplitClips, SplitHeads, SplitWindows, Ulysses
from .rows import SwitchRows, WholeSamples
from .strategy import REPLICATED, AllToAll, BlockLayouts, OneLayout, Strategy
from .token_exchange import SplitGather

__all__ = [
    "AllToAll",
    "BlockLayouts",
    "OneLayout",
    "REPLICATED",
    "SplitHeads",
    "Strategy",
    "SwitchRows",
    "WholeSamples",
    "register_strategy",
    "registered_strategies",
    "strategy_for",
    "with_chunks",
]

# Of the strategies with a batch's ``option`` the first one that applies is chosen.
IN_ORDER: list[type[Strategy]] = [
    WholeSamples,
    SplitClips,
    SplitWindows,
    SplitHeads,
    SwitchRows,
    Ulysses,
    SplitGather,
]


def register_strategy(strategy: type[Strategy]) -> type[Strategy]:
    """Let ``parallelize``, the config and the planner use a strategy; also as a decorator.

    It is asked before all strategies registered so far.

    Raises:
        ValueError: if another strategy has the same label.
    """
    if any(registered.label == strategy.label for registered in IN_ORDER):
        raise ValueError(
            f"got a second strategy {strategy.label!r}; expected a label that no other strategy "
            "has; rename it"
        )
    # First, so that it can take shapes from the strategies of this package.
    IN_ORDER.insert(0, strategy)
    if strategy.option not in STRATEGY_OPTIONS:
        STRATEGY_OPTIONS.append(strategy.option)
    return strategy


def registered_strategies() -> tuple[type[Strategy], ...]:
    """All strategies, in the order in which they are asked."""
    return tuple(IN_ORDER)


def strategy_for(shape: BatchShape, options: Options, ranks: int) -> type[Strategy]:
    """The strategy for a batch of this shape, the same on all ranks.

    Raises:
        ValueError: if none of the option's strategies applies.
    """
    # Whatever the option: a single rank has nobody to send to.
    if ranks == 1:
        return WholeSamples

    for strategy in IN_ORDER:
        if strategy.option == options.strategy and strategy.applies(shape, options, ranks):
            return strategy
    raise ValueError(
        f"got a batch to which no strategy of the option {options.strategy!r} applies: {shape} "
        f"on {ranks} ranks; expected one of {STRATEGY_OPTIONS} that does; choose another one, or "
        "register a strategy of this option whose applies() is true"
    )


def with_chunks(options: Options, shape: BatchShape, ranks: int, *, element_size: int) -> Options:
    """The options for switches of this shape: ``overlap_chunks="auto"`` is a number."""
    if options.overlap_chunks != "auto" or strategy_for(shape, options, ranks) is not SwitchRows:
        return options
    tokens = max(shape.entries(SPATIAL_ROWS, ranks))
    sent = tokens * (ranks - 1) / ranks * shape.width * element_size
    # The busiest rank's bytes: every rank must choose the same number of chunks.
    return replace(options, overlap_chunks=best_chunks(options.cost_model, options.link, sent))
