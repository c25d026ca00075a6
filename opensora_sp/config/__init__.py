"""Configs: mmengine-style files, a schema that refuses what it does not know, overrides that are data."""

from .load import dump_config, explain, load_inference_config, load_train_config, parse_override
from .schema import InferenceConfig, PromptOptions, TrainConfig, build_component, split_type

__all__ = [
    "InferenceConfig",
    "PromptOptions",
    "TrainConfig",
    "build_component",
    "dump_config",
    "explain",
    "load_inference_config",
    "load_train_config",
    "parse_override",
    "split_type",
]
