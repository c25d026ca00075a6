"""Checks of a config at the start of a run: its processes and its device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from opensora_sp.common.tensors import DTYPES
from opensora_sp.models.kernels.fused import check_kernels
from opensora_sp.parallel.mesh import check_sp_size
from opensora_sp.parallel.rank_groups import check_degrees_in
from opensora_sp.runtime.cost_models import cost_model_of

from .draft import raise_together

if TYPE_CHECKING:
    from .inference_config import InferenceConfig
    from .train_config import TrainConfig


def check_launch(cfg: TrainConfig | InferenceConfig, world_size: int) -> None:
    """Check a config for ``world_size`` processes on this machine; needs no process group.

    Raises:
        ValueError: with everything that does not fit.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    raise_together(
        lambda: _check_sp_size(cfg.sp_size or world_size, world_size),
        lambda: cost_model_of(cfg.cost_model),
        lambda: _check_precision(cfg.precision),
        lambda: _check_optimizer(cfg),
        lambda: check_kernels(cfg.kernels, device, DTYPES[cfg.precision]),
    )


def _check_sp_size(sp_size: int | str | dict[str, int], world_size: int) -> None:
    if isinstance(sp_size, int):
        check_sp_size(sp_size, world_size)
        return

    if isinstance(sp_size, dict):
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        check_degrees_in(sp_size, world_size, ranks_per_node)


def _check_precision(precision: str) -> None:
    if precision == "fp16" and not torch.cuda.is_available():
        raise ValueError(
            "got precision 'fp16' without CUDA; expected 'fp32' or 'bf16' on CPU; change precision"
        )
    if precision != "bf16" or not torch.cuda.is_available():
        return

    # No process group exists yet: the launcher's variables name this rank's device.
    device = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise ValueError(
            f"got precision 'bf16' on {torch.cuda.get_device_name(device)}, which computes it in "
            "software; expected a device of compute capability 8.0 or more; set precision='fp16'"
        )


def _check_optimizer(cfg: TrainConfig | InferenceConfig) -> None:
    # Of trainings alone.
    optimizer = getattr(cfg, "optimizer", None)
    is_fused = optimizer is not None and optimizer.type == "HybridAdam"
    if is_fused and not torch.cuda.is_available():
        raise ValueError(
            "got optimizer.type 'HybridAdam' without CUDA; expected 'AdamW' on CPU, where "
            "HybridAdam's kernels do not build; change optimizer.type"
        )
