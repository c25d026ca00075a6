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

from .reference import modulation as reference_modulation
from .reference.modulation import Part
from .selection import Kernels, chosen, current_kernels, set_kernels, using_kernels

__all__ = [
    "Kernels",
    "Part",
    "add_gated",
    "add_norm_modulate",
    "chosen",
    "current_kernels",
    "norm_modulate",
    "set_kernels",
    "using_kernels",
]


def norm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """See ``reference/modulation.py``."""
    return _modulation(x).norm_modulate(x, shift, scale, part)


def add_norm_modulate(
    x: Tensor, branch: Tensor, shift: Tensor, scale: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """See ``reference/modulation.py``."""
    return _modulation(x).add_norm_modulate(x, branch, shift, scale, part)


def add_gated(x: Tensor, gate: Tensor, branch: Tensor, part: Part | None = None) -> Tensor:
    """See ``reference/modulation.py``."""
    return _modulation(x).add_gated(x, gate, branch, part)


def _modulation(like: Tensor) -> Any:
    if chosen("modulation", like):
        from .triton import modulation

        return modulation
    return reference_modulation
