"""A linear layer and GELU, as in the MLP of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .selection import chosen


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x @ weight.T + bias)`` with the tanh approximation (Hendrycks & Gimpel, 2016).

    Args:
        x: ``[..., C]``, any floating dtype.
        weight, bias: ``[F, C]`` and ``[F]``.

    Returns:
        ``[..., F]``.
    """
    if chosen("gelu", x):
        from .triton import gelu as kernel

        return kernel.linear_gelu(x, weight, bias)
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")
