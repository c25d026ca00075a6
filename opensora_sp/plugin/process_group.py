"""Join the processes that ``torchrun`` or ``colossalai run`` started, on CUDA or on CPU."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.runtime.rendezvous import join_rendezvous, start_process_group
from opensora_sp.runtime.run_store import RunStore
from opensora_sp.runtime.watchdog import Watchdog

from ._colossalai import CpuAccelerator, get_accelerator, get_dist_logger, set_accelerator, set_seed


def launch(seed: int, store: RunStore | None = None, *, timeout: timedelta | None = None) -> None:
    """Initialise the process group from the launcher's environment, quietly.

    The backend is NCCL on CUDA, gloo on CPU.

    Args:
        seed: of all generators in this process.
        store: of ranks that have joined a rendezvous, around which a ``Watchdog`` runs; by default
            they join one here.
        timeout: of collectives, for any backend; None takes torch's, which differ by backend.

    Raises:
        ValueError: on every rank, if ranks are missing or differ in versions or devices; see
            ``join_rendezvous``.
    """
    use_cpu_if_nothing_else()
    # ColossalAI logs to stdout.
    get_dist_logger().set_level("ERROR")
    if dist.is_initialized():
        return

    accelerator = get_accelerator()
    if accelerator.support_set_device:
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))

    # Plain python sets no environment, and one process needs no store that others reach.
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(
            accelerator.communication_backend,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timeout,
        )
    elif store is not None:
        start_process_group(store, timeout=timeout)
    else:
        joined = join_rendezvous()
        with Watchdog(joined, grace_time=0):
            start_process_group(joined, timeout=timeout)
    set_seed(seed)


def current_device() -> torch.device:
    """The torch device that ColossalAI computes on in this process."""
    device: torch.device = get_accelerator().get_current_device()
    return device


class GlooCpuAccelerator(CpuAccelerator):
    """A CPU accelerator whose stream calls do nothing; ColossalAI's raises, and ZeRO makes them."""

    def _no_stream(self, *args: Any, **kwargs: Any) -> None:
        """A CPU has one stream, which is always current and never ahead of the host."""

    Stream = current_stream = default_stream = set_stream = _no_stream
    synchronize = empty_cache = _no_stream

    def stream(self, stream_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


def use_cpu_if_nothing_else() -> None:
    """Install the CPU accelerator if ColossalAI found no device and none was chosen."""
    if type(get_accelerator()) is CpuAccelerator:
        set_accelerator(GlooCpuAccelerator())
