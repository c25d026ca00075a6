"""Join the processes that ``torchrun`` or ``colossalai run`` started."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from opensora_sp.launching import meet

from ._colossalai import colossalai, get_accelerator, get_dist_logger
from .accelerator import use_cpu_if_nothing_else


def launch(seed: int, settings: Mapping[str, Any] | None = None) -> None:
    """Initialise the process group (NCCL on CUDA, gloo on CPU) from the launcher's environment, quietly.

    Raises:
        ValueError: on every rank, if ranks are missing or differ in versions, devices or ``settings``, which are names
            and JSON values; see ``opensora_sp.launching.meet``.
    """
    use_cpu_if_nothing_else()
    get_dist_logger().set_level("ERROR")  # ColossalAI logs to stdout
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:  # started by plain python: a world of one
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(alone)
        store = meet(settings)
        colossalai.launch_from_torch(seed=seed, verbose=False)
        del store  # the process group keeps it


def current_device() -> torch.device:
    """The torch device that ColossalAI computes on in this process."""
    device: torch.device = get_accelerator().get_current_device()
    return device
