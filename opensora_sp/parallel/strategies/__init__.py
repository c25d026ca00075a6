"""The parallel strategies, one file each: how the tokens of a batch are divided among ranks.

``base.py`` has the interface. A strategy from outside is one subclass of ``Strategy``, passed to
``register_strategy``. Which one a batch gets depends on the user's ``Options`` and on its shape
alone, so all ranks choose the same.
"""

from .base import REPLICATED, BlockLayouts, Strategy
from .branch_switch import BranchSwitch
from .exchanges import AllGather, AllToAll, Exchange
from .one_layout import OneLayout
from .registry import (
    applicable_strategy,
    register_strategy,
    registered_strategies,
    strategy_for,
    strategy_options,
)
from .split_attention import SplitAttention
from .split_both import SplitBoth
from .split_clips import SplitClips
from .split_gather import SplitGather
from .split_heads import SplitHeads
from .split_windows import SplitWindows
from .switch_rows import SwitchRows, chunk_costs, fewest_rows, with_chunks
from .ulysses import Ulysses
from .whole_samples import WholeSamples

__all__ = [
    "AllGather",
    "AllToAll",
    "BlockLayouts",
    "BranchSwitch",
    "Exchange",
    "OneLayout",
    "REPLICATED",
    "SplitAttention",
    "SplitBoth",
    "SplitClips",
    "SplitGather",
    "SplitHeads",
    "SplitWindows",
    "Strategy",
    "SwitchRows",
    "Ulysses",
    "WholeSamples",
    "applicable_strategy",
    "chunk_costs",
    "fewest_rows",
    "register_strategy",
    "registered_strategies",
    "strategy_for",
    "strategy_options",
    "with_chunks",
]

# The last one of an option is asked first, so the default of all shapes comes before those of few.
for strategy in (
    SwitchRows,
    SplitHeads,
    SplitWindows,
    SplitBoth,
    BranchSwitch,
    SplitClips,
    WholeSamples,
    Ulysses,
    SplitGather,
):
    register_strategy(strategy)
