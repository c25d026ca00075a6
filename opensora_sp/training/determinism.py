"""Deterministic kernels: on CUDA, the same step gives the same bits again.

Kernels that add with atomics add in the order in which their blocks end, which varies. On CPU
nothing here has an effect.
"""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)

# Environment variables and their allowed values. cuBLAS gets fixed workspaces, one per stream. With
# rings of NCCL the order follows from the ranks; trees have no reduce-scatter, and NVLS adds in the
# network switch.
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NCCL_ALGO": ("Ring",)}


def use_deterministic_kernels() -> None:
    """Select deterministic kernels for the whole process. Must be called before CUDA is used.

    Attention (FlashAttention-2's dq, memory-efficient attention's split keys), ``index_add`` and
    convolutions use their deterministic variants. An operator that has none raises torch's own
    RuntimeError when it is called. cuBLAS gets a workspace per stream and NCCL a fixed algorithm,
    through the environment.

    Raises:
        ValueError: if the environment selects something else, or CUDA was used before.
    """
    for name, allowed in SETTINGS.items():
        setting = os.environ.get(name, allowed[0])
        if setting.lower() not in [option.lower() for option in allowed]:
            raise ValueError(
                f"got {name}={setting} in the environment with deterministic=True; expected one of "
                f"{allowed}, whose sums have a fixed order; unset it, or leave deterministic out"
            )

    if torch.cuda.is_initialized() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise ValueError(
            "got deterministic=True after CUDA was used; expected it before, since cuBLAS reads "
            "its setting once; set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"
        )

    for name, allowed in SETTINGS.items():
        os.environ.setdefault(name, allowed[0])
    torch.use_deterministic_algorithms(True)

    # Filling new memory with NaN detects reads of it. It costs a write each and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    logger.info("deterministic kernels only: sums have a fixed order")
