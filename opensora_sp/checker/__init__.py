"""Checker of anybody's context parallelism: one process against P ranks.

Needs torch alone. ``check_parallel`` and ``opensora-sp check-parallel FILE`` take a model, a batch
and a function that applies the parallelism.
"""

from .check import check_parallel
from .interface import Applied, Cut, DefinitionError, Difference, Finding, Report

__all__ = ["Applied", "Cut", "DefinitionError", "Difference", "Finding", "Report", "check_parallel"]
