"""From started processes to ranks that may work together: what a launcher said, what this machine has, who has come.

Whatever keeps the ranks of a run from starting is told by all of them in the same sentence, before any long work.
"""

from .environment import Launch
from .machine import check_machine, check_shared_memory
from .meeting import meet, told_to_all_ranks

__all__ = ["Launch", "check_machine", "check_shared_memory", "meet", "told_to_all_ranks"]
