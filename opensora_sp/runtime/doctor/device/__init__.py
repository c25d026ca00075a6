"""``opensora-sp doctor --device``: results of this host's GPUs compared with a CPU's."""

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
