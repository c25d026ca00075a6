"""RMS norm of queries and keys, and rotary position embedding.

Legend: R rows, L tokens of a row, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..functions import normalize, rotate
from .selection import chosen


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
    if chosen("qk_norm", qkv):
        return _triton().qk_norm(qkv, q_weight, k_weight, rotation, eps)

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
    if chosen("qk_norm", x):
        return _triton().linear_qk_norm(x, weight, bias, q_weight, k_weight, rotation, eps)

    qkv = F.linear(x, weight, bias).unflatten(-1, (3, -1, len(q_weight)))
    return qk_norm(qkv, q_weight, k_weight, rotation, eps)


def _triton() -> Any:
    """The Triton kernels, whose imports take a second and fail where Triton is not installed."""
    from .triton import qk_norm

    return qk_norm
