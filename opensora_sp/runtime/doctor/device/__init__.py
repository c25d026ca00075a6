"""``opensora-sp doctor --device``: this machine's GPUs against what the same code computes on CPU."""

from .findings import Finding, Setup
from .run import CHECKS, Examination, examine_device, setup_for

__all__ = [
    "CHECKS",
    "Examination",
    "Finding",
    "Setup",
    "examine_device",
    "setup_for",
]
