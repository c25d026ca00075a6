"""From the host to the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor.to(device)``, queued behind what a GPU is at; from pageable memory the host would
    wait for all of that.

    For what is small: pinned memory is kept for later copies.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
