"""The end of a process group: all ranks arrive first, so that none breaks another's collective."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def shutdown_process_group(*, drain: bool = True) -> None:
    """Destroy the process group and all groups made from it.

    Collective over all ranks. Without a process group it does nothing.

    Args:
        drain: complete what is outstanding first. False after an error, when other ranks may be
            gone.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return

    # Groups that outlive the process group can abort the interpreter at exit.
    gc.collect()
    if drain:
        drain_process_group()
    dist.destroy_process_group()


def drain_process_group() -> None:
    """Wait until all ranks are here and nothing is outstanding in any group.

    Under a watchdog, call it inside: ranks that never come are then reported.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()

    # A barrier would create the communicator of an NCCL group that was never used.
    groups = [group for group in c10d._world.pg_map if "gloo" in dist.get_backend_config(group)]
    for group in groups:
        dist.barrier(group=group)
    if dist.group.WORLD not in groups:
        dist.barrier()


@contextmanager
def closing_process_group() -> Iterator[None]:
    """``shutdown_process_group`` when the block ends, drained unless it ends with an error."""
    drain = False
    try:
        yield
        drain = True
    finally:
        shutdown_process_group(drain=drain)
