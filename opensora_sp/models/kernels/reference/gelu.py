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
    """The hidden layer of blocks, and that of the captions' MLP with many tokens: several tiles for
    each program of backward. Without gradients another product may run, as in sampling."""
    for tokens, width, hidden in (
        (39, sizes.width, sizes.hidden),
        (1100, 16, sizes.width),
    ):
        arguments = dict(
            x=normal(1, tokens, width),
            weight=normal(hidden, width, seed=1) / width**0.5,
            bias=normal(hidden, seed=2),
        )
        yield Example("linear_gelu", arguments, gradients=("x", "weight", "bias"))
        yield Example("linear_gelu", arguments)
