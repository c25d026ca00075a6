"""Configs: mmengine-style files, a schema that refuses what it does not know, overrides that are
data.
"""

from .components import ModelSpec, build_component, split_type
from .errors import explain
from .inference_config import InferenceConfig
from .launch_checks import check_launch, unused_settings
from .load import (
    dump_config,
    load_either,
    load_inference_config,
    load_train_config,
    parse_override,
    saved_train_config,
    sources,
)
from .sections import PromptOptions
from .train_config import TrainConfig

__all__ = [
    "InferenceConfig",
    "ModelSpec",
    "PromptOptions",
    "TrainConfig",
    "build_component",
    "check_launch",
    "dump_config",
    "explain",
    "load_either",
    "load_inference_config",
    "load_train_config",
    "parse_override",
    "saved_train_config",
    "sources",
    "split_type",
    "unused_settings",
]
