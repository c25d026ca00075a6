"""Configs: mmengine-style files, a schema that refuses what it does not know, overrides that are
data.

What reads files, and the keys of trainings, are imported on first use: a sampler needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .components import build_component
from .inference_config import InferenceConfig

if TYPE_CHECKING:
    from .load import dump_config, load_either, load_inference_config, load_train_config
    from .train_config import TrainConfig

__all__ = [
    "InferenceConfig",
    "TrainConfig",
    "build_component",
    "dump_config",
    "load_either",
    "load_inference_config",
    "load_train_config",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from . import load

    return getattr(load, name)
