"""ColossalAI's fused Adam."""

from __future__ import annotations

from typing import Any

import torch


def hybrid_adam(parameters: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """HybridAdam in AdamW mode; its kernels are built at first use and need nvcc."""
    from colossalai.nn.optimizer import HybridAdam

    adam: torch.optim.Optimizer = HybridAdam(parameters, adamw_mode=True, **options)
    return adam
