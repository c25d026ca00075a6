"""``opensora-sp doctor --device``: results of this host's GPUs compared with a CPU's."""

from .examination import CHECKS, Examination, examine_device, setup_for
from .findings import Finding, Setup

__all__ = [
    "CHECKS",
    "Examination",
    "Finding",
    "Setup",
    "examine_device",
    "setup_for",
]
