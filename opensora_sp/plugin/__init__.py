"""The ColossalAI side: a Booster plugin. Nothing outside this folder imports colossalai."""

from .plugin import SequenceParallelPlugin
from .process_group import current_device, launch

__all__ = ["SequenceParallelPlugin", "current_device", "launch"]
