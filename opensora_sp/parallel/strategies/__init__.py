"""The parallel strategies: how the tokens of a batch are divided among ranks.

``strategy.py`` has the interface, ``choice.py`` the order in which strategies are asked. A strategy
from outside is one subclass of ``Strategy``, passed to ``register_strategy``. Which one a batch
gets depends on the user's ``Options`` and on its shape alone, so all ranks choose the same.
"""

from .choice import (
    chunk_costs,
    fewest_rows,
    register_strategy,
    registered_strategies,
    strategy_for,
    with_chunks,
)
from .heads import SplitAttention, SplitHeads
from .rows import SwitchRows, WholeSamples
from .strategy import (
    REPLICATED,
    AllGather,
    AllToAll,
    BlockLayouts,
    Exchange,
    OneLayout,
    Strategy,
)
from .token_exchange import BranchSwitch

__all__ = [
    "AllGather",
    "AllToAll",
    "BlockLayouts",
    "BranchSwitch",
    "Exchange",
    "OneLayout",
    "REPLICATED",
    "SplitAttention",
    "SplitHeads",
    "Strategy",
    "SwitchRows",
    "WholeSamples",
    "chunk_costs",
    "fewest_rows",
    "register_strategy",
    "registered_strategies",
    "strategy_for",
    "with_chunks",
]
