"""Reordering without repetition, whose backward adds nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def take(x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """``x.index_select(dim, index)`` for an ``index`` without duplicates.

    Each gradient has one place then, and is written there. The backward of ``index_select`` would
    add it: on CUDA by an atomic each, in the dtype of x.
    """
    return _Take.apply(x, index, dim)


class _Take(torch.autograd.Function):
    """Forward takes the entries. Backward writes their gradients back, and zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.shape = dim, x.shape
        return x.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(ctx.dim, index, grad), None, None
