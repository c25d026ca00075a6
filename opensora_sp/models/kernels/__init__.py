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
    "check_kernels",
    "chosen",
    "current_kernels",
    "set_kernels",
    "using_kernels",
]
