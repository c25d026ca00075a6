"""Kernels, of Triton and of attention, run on a device after their results were compared there.

Nothing that has never run on a device is trusted: its values and gradients are compared with plain
torch on a small batch when a run starts. All ranks take the same verdict. A file remembers what has
passed, so that the next run on this kind of device starts at once.
"""

from .attention import choose_attention
from .kernels import choose_kernels, warn_of_changes

__all__ = ["choose_attention", "choose_kernels", "warn_of_changes"]
