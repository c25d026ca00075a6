"""Checkpoints and weights on disk: paths, saves, verification, and how models load them.

Modules that need the models are imported on first use: a program that only saves tensors imports
no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .checkpoint_folder import CheckpointFolder, DamagedCheckpointError, verify
from .filesystem import FileSystem
from .paths import (
    checkpoint_name,
    checkpoint_step,
    committed_checkpoints,
    find_weights,
    newest_checkpoint,
    weight_files,
)
from .reader import Stored, Weights, open_weights, saved_config
from .state_dict import check_names, fitted
from .tensor_file import Spec, TensorFile
from .writer import Part, SaveJob, Saver, on_rank_0
from .zero_shards import NamedShards, load_model

if TYPE_CHECKING:
    from .adapters import Adapters, check_adapters, open_adapters
    from .model_config import check_encoders, check_model_config, write_model_config
    from .pretrained import from_pretrained, new_folder, save_pretrained

__all__ = [
    "Adapters",
    "CheckpointFolder",
    "DamagedCheckpointError",
    "FileSystem",
    "NamedShards",
    "Part",
    "SaveJob",
    "Saver",
    "Spec",
    "Stored",
    "TensorFile",
    "Weights",
    "check_adapters",
    "check_encoders",
    "check_model_config",
    "check_names",
    "checkpoint_name",
    "checkpoint_step",
    "committed_checkpoints",
    "find_weights",
    "fitted",
    "from_pretrained",
    "load_model",
    "new_folder",
    "newest_checkpoint",
    "on_rank_0",
    "open_adapters",
    "open_weights",
    "save_pretrained",
    "saved_config",
    "verify",
    "weight_files",
    "write_model_config",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from . import adapters, model_config, pretrained

    for module in (pretrained, model_config):
        if hasattr(module, name):
            return getattr(module, name)
    return getattr(adapters, name)
