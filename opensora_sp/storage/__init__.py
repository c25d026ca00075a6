"""Named tensors on disk: written tensor by tensor, whole or not at all, and checked before they are read."""

from .disk import Disk
from .folder import CheckpointFolder, set_aside, verify
from .saver import Part, SaveJob, Saver, on_rank_0
from .tensors import Spec, TensorFile

__all__ = [
    "CheckpointFolder",
    "Disk",
    "Part",
    "SaveJob",
    "Saver",
    "Spec",
    "TensorFile",
    "on_rank_0",
    "set_aside",
    "verify",
]
