"""Copies between host and device that do not synchronize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor.to(device)`` without blocking the host.

    A copy from pageable memory waits for all work queued on the GPU. For small tensors only: pinned
    memory is cached for later copies.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class ToHost:
    """A copy of a tensor to the host, queued when it is created and awaited when it is read."""

    def __init__(self, tensor: Tensor) -> None:
        # With non_blocking, torch copies into pinned memory.
        self._copy = tensor.to("cpu", non_blocking=True)
        self._done = torch.cuda.Event() if tensor.is_cuda else None
        if self._done is not None:
            self._done.record()

    def tolist(self) -> Any:
        """The numbers, as ``Tensor.tolist`` returns them."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()
