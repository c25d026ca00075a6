"""Copies from host to device that do not synchronize."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor.to(device)`` without blocking the host.

    A copy from pageable memory waits for all work queued on the GPU. For small tensors only: pinned
    memory is cached for later copies.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
