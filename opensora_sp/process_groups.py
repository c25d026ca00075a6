"""Which backend a process group takes."""

from __future__ import annotations

import torch.distributed as dist


def host_backend() -> str:
    """The backend for tensors on the CPU: what the default group has for them, else gloo.

    A group initialised with "nccl" has none, one with "cpu:gloo,cuda:nccl" has gloo.
    """
    for pair in dist.get_backend_config().split(","):
        device, _, backend = pair.partition(":")
        if device == "cpu":
            return backend
    return "gloo"
