"""A linear layer and GELU, as in the MLP of a block."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from ..examples import Example, Sizes, normal


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x @ weight.T + bias)`` with the tanh approximation (Hendrycks & Gimpel, 2016).

    Args:
        x: ``[..., C]``, any floating dtype.
        weight, bias: ``[F, C]`` and ``[F]``.

    Returns:
        ``[..., F]``.
    """
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def examples(sizes: Sizes) -> Iterator[Example]:
    """See ``examples.py``."""
    yield Example(
        "linear_gelu",
        dict(
            x=normal(3, 13, sizes.width),
            weight=normal(sizes.hidden, sizes.width, seed=1) / sizes.width**0.5,
            bias=normal(sizes.hidden, seed=2),
        ),
        gradients=("x", "weight", "bias"),
    )
