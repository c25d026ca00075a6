"""Checker of anybody's context parallelism: one process against P ranks.

Needs torch alone. ``check_parallel`` and ``opensora-sp check-parallel FILE`` take a model, a batch
and a function that applies the parallelism.
"""

from .check import check_parallel
from .definition import Applied, Cut, DefinitionError, Heads
from .report import Finding, ModuleDifference, Report

__all__ = [
    "Applied",
    "DefinitionError",
    "Cut",
    "Finding",
    "Heads",
    "ModuleDifference",
    "Report",
    "check_parallel",
]
