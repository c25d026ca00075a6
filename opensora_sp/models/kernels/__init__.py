"""Fused kernels: each function is written in plain torch, and may run a Triton kernel instead.

``chosen`` decides which one; on a CPU it is always plain torch. ``triton/<name>.py`` has the same
functions as ``<name>.py``, and is imported only where it is chosen.
"""

from .gelu import linear_gelu
from .modulation import Part, add_gated, add_gated_twice, add_norm_modulate, norm_modulate
from .qk_norm import linear_qk_norm, qk_norm
from .selection import (
    Kernels,
    check_kernels,
    chosen,
    current_kernels,
    set_kernels,
    using_kernels,
)
from .short_rows import attend_short_rows

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
