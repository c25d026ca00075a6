"""The parallel strategies: how the tokens of a batch are divided among ranks.

``strategy.py`` has the interface, ``choice.py`` the order in which strategies are asked. A strategy
from outside is one subclass of ``Strategy``, passed to ``register_strategy``. Which one a batch
gets depends on the user's ``Options`` and on its shape alone, so all ranks choose the same.
"""

from .choice import register_strategy, registered_strategies, strategy_for, with_chunks
from .heads import SplitHeads
from .rows import SwitchRows, WholeSamples
from .strategy import REPLICATED, AllToAll, BlockLayouts, OneLayout, Strategy

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
