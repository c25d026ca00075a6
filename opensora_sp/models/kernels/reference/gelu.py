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
    """The hidden layer of blocks, also with more tokens than backward takes with one tile for each
    program. Without gradients another product may run, as in sampling."""
    hidden = sizes.hidden
    for tokens, width in ((39, sizes.width), (1700, 16)):
        arguments = dict(
            x=normal(1, tokens, width),
            weight=normal(hidden, width, seed=1) / width**0.5,
            bias=normal(hidden, seed=2),
        )
        yield Example("linear_gelu", arguments, gradients=("x", "weight", "bias"))
        yield Example("linear_gelu", arguments)
