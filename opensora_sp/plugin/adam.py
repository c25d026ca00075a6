"""Adam in a few kernels for all parameters: torch's fused one, and ColossalAI's HybridAdam."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def hybrid_adam(parameters: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """HybridAdam in AdamW mode; its kernels are built at first use and need nvcc."""
    from colossalai.nn.optimizer import HybridAdam

    adam: torch.optim.Optimizer = HybridAdam(parameters, adamw_mode=True, **options)
    return adam


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's Adam or AdamW, and its options do not ask for another way."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    groups = optimizer.param_groups
    return not any(g["foreach"] or g["differentiable"] or g["fused"] is False for g in groups)


@contextmanager
def fused(
    optimizer: torch.optim.Optimizer, divisor: Tensor | None, found_inf: Tensor | None
) -> Iterator[None]:
    """Inside, ``optimizer.step`` runs torch's fused kernels, by the protocol of its ``GradScaler``.

    Args:
        optimizer: one that ``can_fuse``.
        divisor: what gradients are divided by, float32 ``[]``.
        found_inf: 1.0 skips the step on the device, 0.0 takes it, float32 ``[]``.
    """
    adam: Any = optimizer
    former = [group["fused"] for group in adam.param_groups]
    _move_step_counts(adam)
    for group in adam.param_groups:
        group["fused"] = True
    adam.grad_scale, adam.found_inf = divisor, found_inf
    try:
        yield
    finally:
        del adam.grad_scale, adam.found_inf
        for group, value in zip(adam.param_groups, former, strict=True):
            group["fused"] = value


def _move_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Move counts of steps to the device: torch's other kernels keep them on the CPU."""
    for weight, state in optimizer.state.items():
        # None: the parameter has had no gradient yet.
        count = state.get("step")
        if count is not None and getattr(count, "device", None) != weight.device:
            state["step"] = torch.as_tensor(count, dtype=torch.float32, device=weight.device)
