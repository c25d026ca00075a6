"""Operations whose backward reads and writes less than autograd's.

``normalize`` and ``rotate`` compute in at least float32 and round where the result is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def normalize(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps)`` over the last dim."""
    return _Normalize.apply(x, eps)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs of neighbouring channels ``[..., D]``.

    Args:
        rotation: ``[2, ..., D]``, the cosine of each pair's angle and its sine, which is negated
            for the first channel of the pair.
    """
    return _Rotate.apply(x, rotation)


def with_zero_gradients(x: Tensor, *unused: Tensor) -> Tensor:
    """``x``, with zeros as gradients of tensors that it does not depend on.

    The last one's gradient comes first, as if they had been used one after the other.
    """
    for tensor in unused:
        x = _Unused.apply(x, tensor)
    return x


def take(x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """``x.index_select(dim, index)`` for an ``index`` without duplicates.

    Each gradient has one place then, and is written there. The backward of ``index_select`` would
    add it: on CUDA by an atomic each, in the dtype of x.
    """
    return _Take.apply(x, index, dim)


class _Normalize(torch.autograd.Function):
    """``y = x / rms``; backward is ``(grad - y * mean(grad * y)) / rms``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.eps = eps
        ctx.save_for_backward(x, inverse)
        return _rounded(x, torch.mul, x, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, inverse = ctx.saved_tensors
        # This gradient is differentiated in turn.
        if torch.is_grad_enabled():
            inverse = _inverse_rms(x, ctx.eps)

        # Wide, and not from the rounded result: the two terms may nearly cancel, and their
        # products overflow in float16.
        y = x * inverse
        mean = (grad * y).mean(-1, keepdim=True)
        return _rounded(grad, torch.mul, torch.addcmul(grad, y, mean, value=-1), inverse), None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x ** 2) + eps)`` over the last dim, ``[..., 1]`` in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # The norm of a vector, unlike a mean of squares, writes no tensor of squares.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return torch.rsqrt(length.square() / x.shape[-1] + eps)


class _Rotate(torch.autograd.Function):
    """Backward rotates back: the transpose of a rotation is its inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(rotation)
        return _rotated(x, *rotation, direction=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rotation,) = ctx.saved_tensors
        return _rotated(grad, *rotation, direction=-1), None


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor, *, direction: int) -> Tensor:
    swapped = torch.stack([x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return _rounded(x, torch.addcmul, x * cosine, swapped, sine, value=direction)


class _Unused(torch.autograd.Function):
    """Forward returns the first tensor. Backward returns zeros for the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        ctx.shape = unused.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_zeros(ctx.shape)


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


def _rounded(like: Tensor, operator: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """The result of an operator in the dtype of ``like``, without a wider tensor in between."""
    # Compilers fuse the two. Neither they nor autograd take ``out``.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return operator(*args, **options).to(like.dtype)
    return operator(*args, **options, out=torch.empty_like(like))
