"""Join the processes that ``torchrun`` or ``colossalai run`` started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.runtime.process_group import start_process_group
from opensora_sp.runtime.rendezvous import join_rendezvous

from ._colossalai import get_accelerator, get_dist_logger, set_seed
from .accelerator import use_cpu_if_nothing_else


def launch(
    seed: int, settings: Mapping[str, Any] | None = None, *, timeout: timedelta | None = None
) -> None:
    """Initialise the process group from the launcher's environment, quietly.

    The backend is NCCL on CUDA, gloo on CPU.

    Args:
        seed: of all generators in this process.
        settings: what must be equal on all ranks, as names and JSON values.
        timeout: of collectives, for any backend; None takes torch's, which differ by backend.

    Raises:
        ValueError: on every rank, if ranks are missing or differ in versions, devices or
            ``settings``; see ``opensora_sp.runtime.join_rendezvous``.
    """
    use_cpu_if_nothing_else()
    # ColossalAI logs to stdout.
    get_dist_logger().set_level("ERROR")
    if dist.is_initialized():
        return

    # Stores must live until the process group holds them. The first: started by plain python.
    own = None if "WORLD_SIZE" in os.environ else _become_a_world_of_one()
    store = join_rendezvous(settings)
    accelerator = get_accelerator()
    if accelerator.support_set_device:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    start_process_group(store, accelerator.communication_backend, current_device(), timeout)
    set_seed(seed)
    del own, store


def _become_a_world_of_one() -> dist.Store:
    """Set the environment that a launcher would set for one process; returns the store it names.

    The store chooses its port when it binds it, so that no other process can take it in between.
    """
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,  # so that init_process_group in this process finds the same one
    )
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    return store


def current_device() -> torch.device:
    """The torch device that ColossalAI computes on in this process."""
    device: torch.device = get_accelerator().get_current_device()
    return device
