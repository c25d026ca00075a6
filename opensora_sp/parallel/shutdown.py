"""The end of a process group: all ranks arrive first, or an error of one rank ends them all.

The end of a process breaks the collectives of its peers, whose errors ("Connection closed by peer")
name no reason. So a rank that an error ends leaves the reason in the store of the default group,
and its peers add it to their errors. Runs of this package have a watchdog in addition, which also
notices ranks that hang.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

FAILURE = "opensora_sp/failure"
# Seconds for an answer of the store: a host that is stopped never gives one.
STORE_TIMEOUT = 5.0


def shutdown_process_group(*, drain: bool = True) -> None:
    """Destroy the process group and all groups made from it.

    Collective over all ranks. Without a process group it does nothing.

    Args:
        drain: complete outstanding collectives first. False after an error, when other ranks may be
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
    """Wait until all ranks arrive and nothing is outstanding in any group.

    Under a watchdog, call it inside: ranks that never come are then reported.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return

    if torch.cuda.is_initialized():
        # Kernels of NCCL that are queued have to end before their communicator goes.
        torch.cuda.synchronize()

    # A barrier would create the communicator of an NCCL group that was never used.
    groups = [group for group in c10d._world.pg_map if "gloo" in dist.get_backend_config(group)]
    for group in groups:
        dist.barrier(group=group)
    if dist.group.WORLD not in groups:
        dist.barrier()


@contextmanager
def closing_process_group() -> Iterator[None]:
    """``shutdown_process_group`` when the block ends, drained unless it ends with an error.

    An error also ends the other ranks, see ``report_failure``.
    """
    drain = False
    try:
        yield
        drain = True
    except Exception as error:
        # A watchdog within the block has reported it already.
        if not getattr(error, "is_logged", False):
            report_failure(error)
        raise
    finally:
        shutdown_process_group(drain=drain)


def report_uncaught_errors() -> None:
    """Call ``report_failure`` with the error that ends this process, before it is printed."""
    # A process may make several meshes; a hook in a hook would report an error twice.
    is_installed = isinstance(sys.excepthook, partial) and sys.excepthook.func is _report
    if not is_installed:
        sys.excepthook = partial(_report, sys.excepthook)


def report_failure(error: Exception) -> None:
    """Leave the error that ends this rank to the other ranks, in the store of the default group.

    The end of this process breaks their collectives. They call this function as well, and get the
    first reason as a note of their errors. Without a process group of several ranks nothing is
    done. If rank 0 hosts the store, as without torchrun, its reason ends with it.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return

    rank, store = dist.get_rank(), c10d._get_default_store()
    reason = f"rank {rank} failed: {type(error).__name__}: {error}"
    answers: list[str] = []

    def leave_reason() -> None:
        # Whoever hosts the store may be gone.
        with suppress(RuntimeError):
            answers.append(store.compare_set(FAILURE, "", reason).decode())

    # A call of a store has no time limit.
    leaving = threading.Thread(target=leave_reason, daemon=True)
    leaving.start()
    leaving.join(STORE_TIMEOUT)
    first_reason = answers[0] if answers else reason
    # Errors that all ranks raise alike need no note with the same words.
    if first_reason.partition(":")[2] != reason.partition(":")[2]:
        error.add_note(f"first, {first_reason}")


def _report(print_error: Callable[..., Any], kind: Any, error: Any, traceback: Any) -> None:
    # Ctrl-C reaches all ranks by itself.
    if isinstance(error, Exception):
        report_failure(error)
    print_error(kind, error, traceback)
