"""How a run of several processes ends: what each rank does about its launcher, its peers and itself."""

from .processes import leave_process_group
from .watch import Watch, backend_timeout

__all__ = ["Watch", "backend_timeout", "leave_process_group"]
