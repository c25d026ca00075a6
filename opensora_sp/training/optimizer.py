"""The optimizer of a training config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from opensora_sp.config import TrainConfig
from opensora_sp.config.optimizer import Optimizer
from opensora_sp.config.schedule import learning_rate

__all__ = ["check_optimizer", "check_same_state", "learning_rate", "make_optimizer"]


def make_optimizer(cfg: TrainConfig, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An elementwise optimizer of torch by its name, or ColossalAI's HybridAdam on CUDA.

    It has no state yet: the plugin, which shards the weights, makes what a class begins with.

    Raises:
        ValueError: for numbers that the class refuses.
    """
    name, options = cfg.optimizer.type, cfg.optimizer.options
    if name == "HybridAdam":
        from opensora_sp.plugin.adam import hybrid_adam

        return hybrid_adam(parameters, **options)

    try:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **options)
    except ValueError as error:
        raise ValueError(
            f"got options {options} of optimizer.type {name!r}; expected what torch.optim.{name} "
            f"takes ({error}); change them"
        ) from None
    # Adagrad begins with a state of whole weights; the plugin makes one of this rank's shards.
    made.state.clear()
    return made


def check_optimizer(cfg: TrainConfig) -> None:
    """Raise ValueError if torch's class refuses the options; HybridAdam is not built for this."""
    if cfg.optimizer.type != "HybridAdam":
        make_optimizer(cfg, [torch.nn.Parameter(torch.zeros(1))])


def check_same_state(cfg: TrainConfig, saved: dict[str, Any], checkpoint: Path) -> None:
    """Raise ValueError if a checkpoint's moments are not those of the config's optimizer.

    Args:
        saved: ``optimizer`` of the config that the checkpoint was written with.
    """
    theirs = Optimizer(**saved)
    if theirs.moments != cfg.optimizer.moments or theirs.scalars != cfg.optimizer.scalars:
        raise ValueError(
            f"got optimizer.type {cfg.optimizer.type!r}, which keeps "
            f"{_named(cfg.optimizer)}, to resume from {checkpoint}, which has {_named(theirs)} of "
            f"{theirs.type!r}; expected the same state; change it back, or start a new run from "
            f"these weights with --cfg-options load={checkpoint}"
        )


def _named(optimizer: Optimizer) -> str:
    scalars = [name for name in optimizer.scalars if name != "step"]
    return ", ".join([*optimizer.moments, *scalars]) or "no moments"
