"""Alias of ``opensora_sp.checkpoint``, until 1.0."""

from opensora_sp.checkpoint import (  # noqa: F401
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
