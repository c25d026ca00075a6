"""Join the processes that ``torchrun`` or ``colossalai run`` started."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.runtime import join_rendezvous

from ._colossalai import get_accelerator, get_dist_logger, set_seed
from .accelerator import use_cpu_if_nothing_else


def launch(
    seed: int, settings: Mapping[str, Any] | None = None, *, timeout: timedelta | None = None
) -> None:
    """Initialise the process group (NCCL on CUDA, gloo on CPU) from the launcher's environment,
    quietly.

    Args:
        seed: of all generators in this process.
        settings: what must be equal on all ranks, as names and JSON values.
        timeout: of collectives, for any backend; None takes torch's, which differ by backend.

    Raises:
        ValueError: on every rank, if ranks are missing or differ in versions, devices or
            ``settings``; see ``opensora_sp.runtime.join_rendezvous``.
    """
    use_cpu_if_nothing_else()
    get_dist_logger().set_level("ERROR")  # ColossalAI logs to stdout
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:  # started by plain python: a world of one
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            alone = dict(
                RANK="0",
                LOCAL_RANK="0",
                WORLD_SIZE="1",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            os.environ.update(alone)
        store = join_rendezvous(settings)
        _launch(seed, timeout)
        del store  # the process group keeps it


def _launch(seed: int, timeout: timedelta | None) -> None:
    """What ``colossalai.launch_from_torch`` does, which takes no timeout."""
    accelerator = get_accelerator()
    dist.init_process_group(accelerator.communication_backend, timeout=timeout)

    if accelerator.support_set_device:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    set_seed(seed)


def current_device() -> torch.device:
    """The torch device that ColossalAI computes on in this process."""
    device: torch.device = get_accelerator().get_current_device()
    return device
