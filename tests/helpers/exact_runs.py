"""Trainings in float64, to compare with plain torch in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from random_weights import draw_weights
from world_runs import train_in_worlds

from opensora_sp.config import TrainConfig
from opensora_sp.training.trainer import Trainer

LR, MOMENTUM, DECAY = 0.02, 0.8, 0.75
# Settings that show a wrong scale of gradients, with the state after each step.
OF_EACH_STEP = [
    "ckpt_every=1",
    f"optimizer={{'type': 'SGD', 'lr': {LR}, 'momentum': {MOMENTUM}}}",
    f"ema_decay={DECAY}",
    "ema_warmup=False",
    "warmup_steps=0",
]


def exact_model(trainer: Any, cfg: TrainConfig, checkpoint: Path | None = None) -> Any:
    """In place of ``Trainer._build_model``: in float64, with random weights."""
    torch.manual_seed(cfg.seed)
    model = cfg.model_spec.build().double()
    return draw_weights(model, seed=1, std=0.1)


@contextmanager
def in_float64() -> Iterator[None]:
    """Trainers have such a model, and ZeRO steps its weights themselves."""
    from opensora_sp.plugin import SequenceParallelPlugin

    without_copies = partialmethod(SequenceParallelPlugin.__init__, master_weights=False)
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(Trainer, "_build_model", exact_model))
        patched.enter_context(mock.patch.object(SequenceParallelPlugin, "__init__", without_copies))
        yield


def train_exactly(config: Path, runs: list[tuple[int, list[str], str | None]]) -> None:
    with in_float64():
        train_in_worlds(config, runs)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest entry."""
    assert found.dtype == wanted.dtype
    if not wanted.is_floating_point() or not wanted.any():
        return float((found != wanted).any())
    return float((found - wanted).abs().max() / wanted.abs().max())
