"""Alias of ``opensora_sp.checkpoint``, until 1.0."""

from opensora_sp.checkpoint import (
    CheckpointFolder,
    Disk,
    Part,
    SaveJob,
    Saver,
    Spec,
    TensorFile,
    on_rank_0,
    set_aside,
    verify,
)

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
