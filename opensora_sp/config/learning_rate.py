"""Learning rate and EMA decay of a run, as functions of the step alone.

Resuming needs no state of them, and any step can be planned ahead.
"""

from __future__ import annotations

import math

from .train_config import TrainConfig


def learning_rate(cfg: TrainConfig, step: int) -> float:
    """Learning rate of a step, counted from 0: linear warm-up, then ``cfg.lr_schedule``.

    Warm-up reaches ``optimizer.lr`` after ``warmup_steps``, as Open-Sora's does. Linear and cosine
    decay then go down to zero at ``max_steps``.
    """
    warm = min(1.0, (step + 1) / (cfg.warmup_steps + 1))
    if cfg.lr_schedule == "constant":
        return cfg.optimizer.lr * warm
    progress = max(0, step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    if cfg.lr_schedule == "linear":
        return cfg.optimizer.lr * warm * (1 - progress)
    return cfg.optimizer.lr * warm * 0.5 * (1 + math.cos(math.pi * progress))


def ema_decay(decay: float, step: int, *, warmup: bool) -> float:
    """EMA decay of a step, counted from 0; see ``ema_warmup`` in ``TrainConfig``."""
    return min(decay, (1 + step) / (10 + step)) if warmup else decay


def describe_schedule(cfg: TrainConfig) -> list[str]:
    """Optimizer, learning rate and EMA weights, for the log and the plan."""
    optimizer, rate = cfg.optimizer, f"{cfg.optimizer.lr:.3g}"
    moments = ", ".join(optimizer.moments) or "no moments"

    end = f"step {cfg.max_steps}" if cfg.max_steps else f"the end of epoch {cfg.epochs}"
    if cfg.lr_schedule == "constant":
        after = f"constant at {rate}"
    else:
        after = f"{cfg.lr_schedule} decay from {rate} to 0 at {end}"
    warmup = f"{cfg.warmup_steps} steps of warm-up, then " if cfg.warmup_steps else ""

    growing = f" (growing from {ema_decay(cfg.ema_decay, 0, warmup=True):.3g})"
    return [
        f"optimizer: {optimizer.type} ({moments}), weight decay {optimizer.weight_decay:g}",
        f"learning rate: {warmup}{after}",
        f"EMA weights: decay {cfg.ema_decay:g}{growing if cfg.ema_warmup else ''}",
    ]
