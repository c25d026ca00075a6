"""The registered strategies, and the choice of one for a batch."""

from __future__ import annotations

from ..batch_shape import BatchShape
from ..options import Options
from .base import Strategy
from .whole_samples import WholeSamples

_REGISTERED: list[type[Strategy]] = []


def register_strategy(strategy: type[Strategy]) -> type[Strategy]:
    """Let ``parallelize``, the config and the planner use a strategy; also as a decorator.

    Of several with the same ``option``, the last one registered whose ``applies`` is true is
    chosen.

    Raises:
        ValueError: if another strategy has the same label.
    """
    if any(one.label == strategy.label for one in _REGISTERED):
        raise ValueError(
            f"got a second strategy {strategy.label!r}; expected a label of its own; rename it"
        )
    _REGISTERED.append(strategy)
    return strategy


def registered_strategies() -> tuple[type[Strategy], ...]:
    """All strategies, in the order of their registration."""
    return tuple(_REGISTERED)


def strategy_options() -> tuple[str, ...]:
    """The values that ``sequence_parallel.strategy`` takes."""
    return tuple(dict.fromkeys(strategy.option for strategy in _REGISTERED))


def strategy_for(shape: BatchShape, options: Options, ranks: int) -> type[Strategy]:
    """The strategy for a batch of this shape, the same on all ranks.

    Raises:
        ValueError: if none of the option's strategies applies.
    """
    strategy = applicable_strategy(shape, options, ranks)
    if strategy is None:
        raise ValueError(
            f"got a batch to which no strategy of the option {options.strategy!r} applies: {shape} "
            f"on {ranks} ranks; expected one of {strategy_options()} that does; choose another "
            "one, or register a strategy of this option whose applies() is true"
        )
    return strategy


def applicable_strategy(shape: BatchShape, options: Options, ranks: int) -> type[Strategy] | None:
    """The strategy for a batch of this shape; None if none of the option's applies."""
    if ranks == 1:
        return WholeSamples

    candidates = [one for one in reversed(_REGISTERED) if one.option == options.strategy]
    return next((one for one in candidates if one.applies(shape, options, ranks)), None)
