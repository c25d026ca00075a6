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

from typing import Any

from torch import Tensor

from .reference import gelu as reference_gelu
from .reference import modulation as reference_modulation
from .reference import qk_norm as reference_qk_norm
from .reference import short_rows as reference_short_rows
from .reference.modulation import Part
from .selection import (
    Kernels,
    check_kernels,
    chosen,
    current_kernels,
    set_kernels,
    using_kernels,
)

__all__ = [
    "Kernels",
    "Part",
    "add_gated",
    "add_gated_twice",
    "add_norm_modulate",
    "attend_short_rows",
    "check_kernels",
    "chosen",
    "current_kernels",
    "linear_gelu",
    "linear_qk_norm",
    "norm_modulate",
    "qk_norm",
    "set_kernels",
    "using_kernels",
]


def norm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """See ``reference/modulation.py``."""
    return _modulation(x).norm_modulate(x, shift, scale, part)


def add_norm_modulate(
    x: Tensor,
    branch: Tensor,
    shift: Tensor,
    scale: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference/modulation.py``."""
    return _modulation(x).add_norm_modulate(x, branch, shift, scale, part, bias)


def add_gated(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See ``reference/modulation.py``."""
    return _modulation(x).add_gated(x, gate, branch, part, bias)


def add_gated_twice(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference/modulation.py``."""
    return _modulation(x).add_gated_twice(x, gate, branch, part, bias)


def _modulation(like: Tensor) -> Any:
    if chosen("modulation", like):
        from .triton import modulation

        return modulation
    return reference_modulation


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


def linear_qk_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotation: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``reference.qk_norm.linear_qk_norm``."""
    arguments = x, weight, bias, q_weight, k_weight, rotation, eps
    if chosen("qk_norm", x):
        from .triton import qk_norm as triton_qk_norm

        return triton_qk_norm.linear_qk_norm(*arguments)
    return reference_qk_norm.linear_qk_norm(*arguments)


def attend_short_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``reference.short_rows.attend_short_rows``."""
    # Under autocast, norms leave queries and keys wider than values.
    q, k = q.to(v.dtype), k.to(v.dtype)
    if chosen("short_rows", v):
        from .triton import short_rows as triton_short_rows

        return triton_short_rows.attend_short_rows(q, k, v)
    return reference_short_rows.attend_short_rows(q, k, v)
