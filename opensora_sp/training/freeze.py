"""Which parameters are trained: all but those that are frozen by name, or adapters alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from opensora_sp.config import TrainConfig
from opensora_sp.models.lora import add_lora
from opensora_sp.models.name_patterns import chosen, matches


def choose_trained(model: nn.Module, cfg: TrainConfig) -> None:
    """Freeze what a config does not train, and add its adapters.

    Raises:
        ValueError: as ``freeze`` and ``add_lora`` do.
    """
    freeze(model, cfg.freeze)
    if cfg.lora is not None:
        add_lora(model, **dict(cfg.lora))


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze parameters by patterns of names; the last match decides, ``!pattern`` trains.

    Raises:
        ValueError: if a pattern matches no parameter, or no parameter is trained.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if not any(matches(name, pattern) for name in parameters):
            modules = list(dict.fromkeys(name.partition(".")[0] for name in parameters))
            raise ValueError(
                f"got {pattern!r} in freeze, which matches no parameter; expected patterns of "
                f"names in {modules}; write for example 'y_embedder.*'"
            )

    for name in chosen(parameters, patterns):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"got freeze {tuple(patterns)}, which leaves nothing to train; expected some "
            "parameters; add '!pattern' for those that are to be trained"
        )


def check_trained(cfg: TrainConfig) -> None:
    """Raise what ``choose_trained`` would raise, without allocating the model."""
    if cfg.freeze or cfg.lora is not None:
        with torch.device("meta"):
            choose_trained(cfg.model_spec.build(), cfg)
