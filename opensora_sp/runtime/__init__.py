"""The processes of a run: launch environment, host checks, rendezvous, and the watchdog."""

from .environment import Launch
from .host_checks import check_machine, check_shared_memory
from .host_routes import connect_hosts
from .processes import init_worker, leave_process_group
from .rendezvous import connect_ranks, join_rendezvous, raise_on_all_ranks
from .run_lock import RunLock
from .start_limit import StartLimit
from .watchdog import Watchdog, backend_timeout

# Former names, until 1.0.
Watch = Watchdog
meet = join_rendezvous
told_to_all_ranks = raise_on_all_ranks

__all__ = [
    "Launch",
    "RunLock",
    "StartLimit",
    "Watch",
    "Watchdog",
    "backend_timeout",
    "check_machine",
    "check_shared_memory",
    "connect_hosts",
    "connect_ranks",
    "init_worker",
    "join_rendezvous",
    "leave_process_group",
    "meet",
    "raise_on_all_ranks",
    "told_to_all_ranks",
]
