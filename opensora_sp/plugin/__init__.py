"""The ColossalAI side: a Booster plugin. Nothing outside this folder imports colossalai."""

from opensora_sp.checkpoint import NamedShards

from .launch import current_device, launch
from .optimizer import SequenceZeroOptimizer
from .plugin import SequenceParallelPlugin

__all__ = [
    "NamedShards",
    "SequenceParallelPlugin",
    "SequenceZeroOptimizer",
    "current_device",
    "launch",
]
