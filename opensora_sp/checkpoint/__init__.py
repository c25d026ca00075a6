"""Checkpoints and weights on disk: where they are, how they are written and checked, how a model reads them."""

from .filesystem import Disk
from .folder import CheckpointFolder, set_aside, verify
from .model_config import check_encoders, check_model_config, model_config_json, write_model_config
from .paths import (
    checkpoint_name,
    checkpoint_step,
    committed_checkpoints,
    find_weights,
    flush,
    newest_checkpoint,
    weight_files,
)
from .pretrained import check_vacant, fill, from_pretrained, save_pretrained
from .reader import Stored, Weights, open_weights, saved_config
from .state_dict import CONVERSIONS, check_conversions, check_names, fitted
from .tensor_file import Spec, TensorFile
from .writer import Part, SaveJob, Saver, on_rank_0

__all__ = [
    "CONVERSIONS",
    "CheckpointFolder",
    "Disk",
    "Part",
    "SaveJob",
    "Saver",
    "Spec",
    "Stored",
    "TensorFile",
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
    "on_rank_0",
    "open_weights",
    "save_pretrained",
    "saved_config",
    "set_aside",
    "verify",
    "weight_files",
    "write_model_config",
]
