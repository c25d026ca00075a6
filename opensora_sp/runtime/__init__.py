"""The processes of a run: launch environment, host checks, rendezvous, and the watchdog."""

from .environment import Launch
from .host_checks import check_machine, check_shared_memory
from .process_group import start_process_group
from .processes import init_worker
from .rendezvous import join_rendezvous, raise_on_all_ranks
from .run_lock import RunLock
from .watchdog import Watchdog, backend_timeout

__all__ = [
    "Launch",
    "RunLock",
    "Watchdog",
    "backend_timeout",
    "check_machine",
    "check_shared_memory",
    "init_worker",
    "join_rendezvous",
    "raise_on_all_ranks",
    "start_process_group",
]
