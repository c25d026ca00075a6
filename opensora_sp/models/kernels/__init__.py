"""Fused kernels (``fused.py``), the setting that chooses them, and their verification."""

from .fused import Kernels, Part, check_kernels, chosen, current_kernels, set_kernels, using_kernels

__all__ = [
    "Kernels",
    "Part",
    "check_kernels",
    "chosen",
    "current_kernels",
    "set_kernels",
    "using_kernels",
]
