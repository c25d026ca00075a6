"""The processes of a run: their environment and hosts, their rendezvous, and a watchdog that propagates failures."""

from .environment import Launch
from .host_checks import check_machine, check_shared_memory
from .processes import leave_process_group
from .rendezvous import meet, told_to_all_ranks
from .watchdog import Watch, backend_timeout

__all__ = [
    "Launch",
    "Watch",
    "backend_timeout",
    "check_machine",
    "check_shared_memory",
    "leave_process_group",
    "meet",
    "told_to_all_ranks",
]
