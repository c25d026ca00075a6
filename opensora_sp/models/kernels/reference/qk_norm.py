"""RMS norm of queries and keys, and rotary position embedding.

Legend: R rows, L tokens of a row, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...functions import normalize, rotate
from ..examples import Example, Sizes, activations, normal


def qk_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rotation: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm queries and keys of each head (Zhang & Sennrich, 2019), then rotate them (Su et al.,
    2021).

    Args:
        qkv: ``[R, L, 3, H, D]``, queries, keys and values of each token, any floating dtype.
        q_weight, k_weight: of the norms, ``[D]``.
        rotation: ``[2, 1 or R, 1 or L, 1, D]``, cosine and sine for each channel, as in
            ``functions.rotate``; None leaves positions out.
        eps: added to the mean square, above zero.

    Returns:
        Queries, keys and values, ``[R, L, H, D]`` each. Values are a view of ``qkv``.
    """
    q, k, v = qkv.unbind(2)
    q, k = q_weight * normalize(q, eps), k_weight * normalize(k, eps)
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    return q, k, v


def linear_qk_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotation: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``qk_norm`` of a linear layer's result: x ``[R, L, C]``, ``weight`` ``[3 * H * D, C]``."""
    qkv = F.linear(x, weight, bias).unflatten(-1, (3, -1, len(q_weight)))
    return qk_norm(qkv, q_weight, k_weight, rotation, eps)


def examples(sizes: Sizes) -> Iterator[Example]:
    """Without rotation, with one for all rows, and with one for each of two long rows."""
    # More than the kernel's sums of weights' gradients add up at a time.
    long = 2**17 // sizes.width + 1
    yield _example(sizes, (3, 13), None)
    yield _example(sizes, (3, 13), _rotation(1, 13, sizes.head_width))
    yield _example(sizes, (2, long), _rotation(2, long, sizes.head_width))
    for rotation in (None, _rotation(1, 13, sizes.head_width), _rotation(3, 13, sizes.head_width)):
        yield _example_of_layer(sizes, (3, 13), rotation)


def _example(sizes: Sizes, shape: tuple[int, int], rotation: Tensor | None) -> Example:
    width = sizes.head_width
    return Example(
        "qk_norm",
        dict(
            qkv=activations(*shape, 3, sizes.heads, width),
            q_weight=normal(width, seed=1),
            k_weight=normal(width, seed=2),
            rotation=rotation,
            eps=1e-6,
        ),
        gradients=("qkv", "q_weight", "k_weight"),
        kept=("rotation",),
    )


def _example_of_layer(sizes: Sizes, shape: tuple[int, int], rotation: Tensor | None) -> Example:
    """Attention leaves the gradients of queries token by token, or head by head."""
    example = _example(sizes, shape, rotation)
    (*_, heads, width), inputs = example.arguments.pop("qkv").shape, 64
    layer = dict(
        x=activations(*shape, inputs),
        weight=normal(3 * heads * width, inputs, seed=3) / inputs**0.5,
        bias=normal(3 * heads * width, seed=4),
    )
    gradients = (*layer, "q_weight", "k_weight")
    return replace(
        example,
        function="linear_qk_norm",
        arguments=layer | example.arguments,
        gradients=gradients,
        swapped={} if rotation is None else {0: (1, 2)},
    )


def _rotation(rows: int, length: int, width: int) -> Tensor:
    angles = 3 * normal(rows, length, 1, width // 2, seed=3)
    angles = torch.stack([-angles, angles], dim=-1).flatten(-2)
    return torch.stack([angles.cos(), angles.sin()])
