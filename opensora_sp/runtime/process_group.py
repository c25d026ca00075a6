"""Join the processes that a launcher started, and make their process group, in plain torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .bounded_store import BoundedStore
from .environment import Launch
from .host_checks import use_device
from .rendezvous import join_rendezvous
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
        timeout: of collectives; None takes the default of ``backend_timeout``.
        alone: initialise a group for a single process as well.

    Raises:
        ValueError: on every rank, if ranks are missing or differ in versions or ``settings``; see
            ``join_rendezvous``.
    """
    rendezvous = join_rendezvous(settings)
    device, backend = use_device(int(os.environ.get("LOCAL_RANK", "0")))
    if dist.is_initialized():
        return device

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start_process_group(rendezvous, backend, device, timeout or backend_timeout())
    elif alone:
        # Its collectives return what they get.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return device


def start_process_group(
    rendezvous: BoundedStore | None,
    backend: str,
    device: torch.device,
    timeout: timedelta | None = None,
) -> None:
    """Make the default process group and connect all ranks; collective.

    Args:
        rendezvous: the store that ``join_rendezvous`` returned; None for a single process.
        device: the device that this rank computes on.
        timeout: of collectives; None takes torch's, which differ by backend.
    """
    launch = None if rendezvous is None else Launch.read()
    if rendezvous is None or launch is None:
        dist.init_process_group(backend, timeout=timeout)
        return

    # The names of this store belong to one attempt: ranks that a launcher has started again must
    # not read the addresses of the attempt before.
    store = dist.PrefixStore("process group", rendezvous.store)
    with StartLimit(store, launch.rank, launch.world_size):
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
        # NCCL connects in its first collective. A barrier would guess the devices of its ranks.
        dist.all_reduce(torch.zeros(1, device=device))
