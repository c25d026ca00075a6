"""The end of a process group, without the deadlock of torch 2.5's own.

A gloo thread that completes a collective can hold the last reference to a tensor that Python has
seen. It drops that tensor under the mutex of its group, and dropping it takes the GIL. torch 2.5
destroys a ``ProcessGroup`` with the GIL held, and ``~ProcessGroupGloo`` waits for the same mutex
and then joins the thread: neither side can continue, and nothing times out. ``Backend`` objects, in
contrast, release the GIL in their destructor. So whoever holds the backends while the process
group is destroyed, and drops them after it, cannot deadlock.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

SECONDS_FOR_THREADS = 0.02  # without the GIL; a thread needs microseconds


def shutdown_process_group(*, drain: bool = True) -> None:
    """Destroy the process group and all groups made from it; use it instead of torch's function.

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

    # The destructors of gloo's groups run in the last line, where they do not hold the GIL.
    backends = list(chain.from_iterable(map(_backends, _groups())))
    dist.destroy_process_group()
    backends.clear()


def drain_process_group() -> None:
    """Wait until all ranks are here and nothing is outstanding in any group.

    The last collective of each group is a barrier, which holds no tensor of Python's. Under a
    watchdog, call it inside: ranks that never come are then reported.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()

    # A barrier would create the communicator of an NCCL group that was never used.
    groups = [group for group in _groups() if "gloo" in dist.get_backend_config(group)]
    for group in groups:
        dist.barrier(group=group)
    if dist.group.WORLD not in groups:
        dist.barrier()

    # The barrier is complete, but the thread that ran an earlier collective may not have dropped
    # its tensors yet. This matters for groups that something else keeps alive.
    time.sleep(SECONDS_FOR_THREADS)


@contextmanager
def closing_process_group() -> Iterator[None]:
    """``shutdown_process_group`` when the block ends, drained unless it ends with an error."""
    drain = False
    try:
        yield
        drain = True
    finally:
        shutdown_process_group(drain=drain)


def _groups() -> list[Any]:
    """The groups that this rank is a member of, in the order of their creation."""
    return list(c10d._world.pg_map)


def _backends(group: Any) -> list[Any]:
    """What implements a group on each device; none for a group that is written in Python."""
    found = []
    for device in group._device_types:
        try:
            found.append(group._get_backend(device))
        except RuntimeError:
            continue
    return found
