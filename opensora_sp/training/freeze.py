"""Freezing of parameters, chosen by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from opensora_sp.config import TrainConfig


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze parameters by patterns of names; the last match decides, ``!pattern`` trains.

    Raises:
        ValueError: if a pattern matches no parameter, or no parameter is trained.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
            modules = list(dict.fromkeys(name.partition(".")[0] for name in names))
            raise ValueError(
                f"got {pattern!r} in freeze, which matches no parameter; expected patterns of "
                f"names in {modules}; write for example 'y_embedder.*'"
            )

    for name, parameter in model.named_parameters():
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern.removeprefix("!"))]
        if matching and not matching[-1].startswith("!"):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"got freeze {tuple(patterns)}, which leaves nothing to train; expected some "
            "parameters; add '!pattern' for those that are to be trained"
        )


def check_freeze(cfg: TrainConfig) -> None:
    """Raise what ``freeze`` would raise, without allocating the model."""
    if cfg.freeze:
        with torch.device("meta"):
            freeze(cfg.model_spec.build(), cfg.freeze)
