"""Checkpoints and weights on disk: paths, saves, verification, and how models load them.

Modules that need the models are imported on first use: a program that only saves tensors imports
no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .filesystem import FileSystem, flush
from .folder import CheckpointFolder, DamagedCheckpointError, set_aside, verify
from .paths import (
    checkpoint_name,
    checkpoint_step,
    committed_checkpoints,
    find_weights,
    newest_checkpoint,
    weight_files,
)
from .reader import (
    PickledWeightsError,
    Stored,
    Weights,
    convert_command,
    open_weights,
    saved_config,
)
from .state_dict import CONVERSIONS, check_conversions, check_names, fitted
from .tensor_file import Spec, TensorFile
from .writer import Part, SaveJob, Saver, on_rank_0
from .zero_shards import NamedShards, load_model

if TYPE_CHECKING:
    from .adapters import Adapters, check_adapters, merged, open_adapters
    from .model_config import (
        check_encoders,
        check_model_config,
        model_config_json,
        write_model_config,
    )
    from .pretrained import check_vacant, fill, from_pretrained, new_folder, save_pretrained

# Until 1.0.
Disk = FileSystem

__all__ = [
    "CONVERSIONS",
    "Adapters",
    "CheckpointFolder",
    "DamagedCheckpointError",
    "Disk",
    "FileSystem",
    "NamedShards",
    "Part",
    "PickledWeightsError",
    "SaveJob",
    "Saver",
    "Spec",
    "Stored",
    "TensorFile",
    "Weights",
    "check_adapters",
    "check_conversions",
    "check_encoders",
    "check_model_config",
    "check_names",
    "check_vacant",
    "checkpoint_name",
    "checkpoint_step",
    "committed_checkpoints",
    "convert_command",
    "fill",
    "find_weights",
    "fitted",
    "flush",
    "from_pretrained",
    "load_model",
    "merged",
    "model_config_json",
    "new_folder",
    "newest_checkpoint",
    "on_rank_0",
    "open_adapters",
    "open_weights",
    "save_pretrained",
    "saved_config",
    "set_aside",
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
