"""Fused kernels: each function runs a Triton kernel, or its reference in plain torch.

``chosen`` decides which one. On a CPU it is always the reference. A public function reads::

    def gelu(x: Tensor) -> Tensor:
        if chosen("gelu", x):
            from .triton import gelu as triton_gelu

            return triton_gelu.gelu(x)
        return reference_gelu.gelu(x)

Triton is imported where it is used, and so only where it is chosen.
"""

from __future__ import annotations

from torch import Tensor

from .reference import gelu as reference_gelu
from .reference import qk_norm as reference_qk_norm
from .selection import Kernels, chosen, current_kernels, set_kernels, using_kernels

__all__ = [
    "Kernels",
    "chosen",
    "current_kernels",
    "linear_gelu",
    "qk_norm",
    "set_kernels",
    "using_kernels",
]


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``reference.gelu.linear_gelu``."""
    if chosen("gelu", x):
        from .triton import gelu as triton_gelu

        return triton_gelu.linear_gelu(x, weight, bias)
    return reference_gelu.linear_gelu(x, weight, bias)


def qk_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rotation: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``reference.qk_norm.qk_norm``."""
    if chosen("qk_norm", qkv):
        from .triton import qk_norm as triton_qk_norm

        return triton_qk_norm.qk_norm(qkv, q_weight, k_weight, rotation, eps)
    return reference_qk_norm.qk_norm(qkv, q_weight, k_weight, rotation, eps)
