"""Join the processes that ``torchrun`` started, in plain torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .host_checks import use_device
from .host_routes import connect_hosts
from .rendezvous import connect_ranks, join_rendezvous
from .start_limit import StartLimit
from .watchdog import backend_timeout


def join_processes(
    settings: Mapping[str, Any] | None = None,
    *,
    timeout: timedelta | None = None,
    alone: bool = False,
) -> torch.device:
    """Initialise the process group of several processes; returns this process's device.

    Args:
        settings: what must be equal on all ranks, as names and JSON values.
        timeout: of collectives, see ``backend_timeout``, whose default None takes.
        alone: initialise a group for a single process as well.

    Raises:
        ValueError: on every rank, if ranks are missing or differ in versions or ``settings``; see
            ``join_rendezvous``.
    """
    store = join_rendezvous(settings)
    device, backend = use_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return device

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with StartLimit.after(store):
            connect_hosts(store)
            dist.init_process_group(backend, timeout=timeout or backend_timeout())
            connect_ranks(device)
    elif alone:
        # Its collectives return what they get.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # The process group keeps it.
    del store
    return device
