"""The order of sums: what a run on CUDA needs so that the same step gives the same bits again.

Kernels that add with atomics add in whatever order their blocks end. On CPU nothing here has an effect.
"""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)

WORKSPACES = (":4096:8", ":16:8")  # of cuBLAS: fixed ones, for each stream

# Of NCCL: the order follows from the ranks. Trees have no reduce-scatter, NVLS adds in the switch.
ALGORITHMS = ("Ring",)
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": WORKSPACES, "NCCL_ALGO": ALGORITHMS}


def use_deterministic_kernels() -> None:
    """Select kernels that add in a fixed order, for the whole process. To be called before CUDA is used.

    Attention (FlashAttention-2's dq, memory-efficient attention's split keys), ``index_add`` and convolutions take
    their deterministic forms; an operator that has none raises torch's own RuntimeError where it is reached. cuBLAS
    gets workspaces of its own for each stream and NCCL a fixed algorithm, through the environment.

    Raises:
        ValueError: if the environment asks for something else, or CUDA was used before.
    """
    for name, allowed in SETTINGS.items():
        value = os.environ.get(name, allowed[0])
        if value.lower() not in [one.lower() for one in allowed]:
            raise ValueError(
                f"got {name}={value} in the environment with deterministic=True; expected one of {allowed}, whose sums "
                "have a fixed order; unset it, or leave deterministic out"
            )
    if torch.cuda.is_initialized() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise ValueError(
            "got deterministic=True after CUDA was used; expected it before, for cuBLAS reads its setting once; set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"
        )

    for name, allowed in SETTINGS.items():
        os.environ.setdefault(name, allowed[0])
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory with NaN finds reads of it, at the price of a write each; it does not change results.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    logger.info("sums have a fixed order: deterministic kernels only")
