"""The backend of process groups for tensors on the CPU."""

from __future__ import annotations

import torch.distributed as dist


def host_backend() -> str:
    """The default group's backend for tensors on the CPU, or gloo.

    A group initialised with "nccl" has none for the CPU, one with "cpu:gloo,cuda:nccl" has gloo.
    """
    for pair in dist.get_backend_config().split(","):
        device, _, backend = pair.partition(":")
        if device == "cpu":
            return backend
    return "gloo"
