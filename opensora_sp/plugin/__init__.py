"""The ColossalAI side: a Booster plugin. Nothing outside this folder imports colossalai."""

from opensora_sp.checkpoint.zero_shards import NamedShards

from .plugin import SequenceParallelPlugin
from .process_group import current_device, launch
from .zero_optimizer import SequenceZeroOptimizer

__all__ = [
    "NamedShards",
    "SequenceParallelPlugin",
    "SequenceZeroOptimizer",
    "current_device",
    "launch",
]
