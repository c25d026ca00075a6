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

from .reference import short_rows as reference_short_rows
from .selection import Kernels, chosen, current_kernels, set_kernels, using_kernels

__all__ = [
    "Kernels",
    "attend_short_rows",
    "chosen",
    "current_kernels",
    "set_kernels",
    "using_kernels",
]


def attend_short_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``reference.short_rows.attend_short_rows``."""
    # Under autocast, norms leave queries and keys wider than values.
    q, k = q.to(v.dtype), k.to(v.dtype)
    if chosen("short_rows", v):
        from .triton import short_rows as triton_short_rows

        return triton_short_rows.attend_short_rows(q, k, v)
    return reference_short_rows.attend_short_rows(q, k, v)
