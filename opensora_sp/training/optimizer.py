"""The optimizer of a training config, and its learning rate as a function of the step."""

from __future__ import annotations

import math

import torch

from opensora_sp.config import TrainConfig


def make_optimizer(cfg: TrainConfig, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW, or ColossalAI's HybridAdam on CUDA."""
    options = cfg.optimizer.model_dump(exclude={"type"})
    if cfg.optimizer.type == "AdamW":
        return torch.optim.AdamW(parameters, **options)
    from opensora_sp.plugin.adam import hybrid_adam

    return hybrid_adam(parameters, **options)


def learning_rate(cfg: TrainConfig, step: int) -> float:
    """Linear warm-up, then constant, or a cosine down to zero at ``max_steps``."""
    warm = min(1.0, (step + 1) / (cfg.warmup_steps + 1))
    if cfg.lr_schedule == "constant":
        return cfg.optimizer.lr * warm
    progress = max(0, step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    return cfg.optimizer.lr * warm * 0.5 * (1 + math.cos(math.pi * progress))
