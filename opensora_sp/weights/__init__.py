"""Weights on disk: where a path has them, what they say they are of, reading them into a model, writing them.

``places`` finds them, ``read`` opens every layout as named tensors that are read when asked for, ``configs``
understands ``config.json``, ``fit`` compares with a model and holds the conversions, ``pretrained`` puts it together.
"""

from .configs import check_encoders, check_model_config, model_config_json, write_model_config
from .fit import CONVERSIONS, check_conversions, check_names, fitted
from .places import (
    checkpoint_name,
    checkpoint_step,
    committed_checkpoints,
    find_weights,
    flush,
    newest_checkpoint,
    weight_files,
)
from .pretrained import check_vacant, fill, from_pretrained, save_pretrained
from .read import Stored, Weights, open_weights, saved_config

__all__ = [
    "CONVERSIONS",
    "Stored",
    "Weights",
    "check_conversions",
    "check_encoders",
    "check_model_config",
    "check_names",
    "check_vacant",
    "checkpoint_name",
    "checkpoint_step",
    "committed_checkpoints",
    "fill",
    "find_weights",
    "fitted",
    "flush",
    "from_pretrained",
    "model_config_json",
    "newest_checkpoint",
    "open_weights",
    "save_pretrained",
    "saved_config",
    "weight_files",
    "write_model_config",
]
