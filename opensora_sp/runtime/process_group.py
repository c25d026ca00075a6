"""Start the process group of ranks that have joined a rendezvous."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from .bounded_store import BoundedStore
from .environment import Launch
from .start_limit import StartLimit


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
