"""Bias and GELU in one pass, and their gradients in another.

The matrix product leaves the bias out. It would add it for free, but its gradient would then be a
sum that reads the hidden layer once more. Per activation of the hidden layer: forward reads and
writes one; backward reads the gradient and the product, and writes the product's gradient. The
product is kept for backward. Where no gradient is computed, bias and GELU go into the product
itself, by cuBLASLt.

Legend: N tokens, F width of the hidden layer.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .operator import opaque_operator
from .sums import sum_parts

# Columns of a tile: divide the widths of the released models.
COLUMNS = 128
TILE_BYTES = 4096
# Programs of backward, at most: 924 run at a time on an H100 SXM, 798 on an H100 PCIe and 756 on an
# A100. These are four waves on the first and nearly five on the others.
PROGRAMS = 3696

# Of the approximation: sqrt(2 / pi), and the share of the third power.
ROOT: tl.constexpr = tl.constexpr(0.7978845608028654)
CUBIC: tl.constexpr = tl.constexpr(0.044715)

# How closely cuBLASLt computes GELU is not documented, so fp32 keeps the kernel.
IN_PRODUCTS = (torch.float16, torch.bfloat16)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See ``kernels/fused.py``."""
    if _goes_into_product(x, weight, bias):
        rows = x.reshape(-1, x.shape[-1])
        y = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
        return y.view(*x.shape[:-1], len(bias))
    return gelu(F.linear(x, weight), bias)


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """``GELU(x + bias)``, x ``[..., F]``."""
    return _Gelu.apply(x, bias)


def _goes_into_product(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """True if cuBLASLt applies bias and GELU to the sums of a product before it writes them.

    Its result is all that is kept, and backward needs the product. A CPU, as of the interpreter,
    would apply GELU without the approximation. Under autocast the dtypes differ.
    """
    same = x.dtype == weight.dtype == bias.dtype and x.dtype in IN_PRODUCTS
    # Meta tensors stand for tensors of a GPU, in plans.
    return same and x.device.type in ("cuda", "meta") and not torch.is_grad_enabled()


def _forward(x: Tensor, bias: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        call = _arguments(x)
        grid = (triton.cdiv(len(bias), COLUMNS) * _row_tiles(call),)
        _gelu_kernel[grid](x, bias, y, **call)
    return y


def _backward(grad_y: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    grad_y, x = grad_y.contiguous(), x.contiguous()
    grad_x = torch.empty_like(x)
    call = _arguments(x)
    columns = triton.cdiv(len(bias), COLUMNS)
    parts = min(max(1, PROGRAMS // columns), _row_tiles(call))
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = x.new_empty(parts, len(bias), dtype=wide)
    if parts:
        _gelu_backward_kernel[columns, parts](grad_y, x, bias, grad_x, sums, **call)
    return grad_x, sum_parts(sums, bias.dtype)


def _fake(x: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(grad_y: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(bias)


gelu_forward = opaque_operator("gelu", _forward, _fake)
gelu_backward = opaque_operator("gelu_backward", _backward, _fake_backward)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return gelu_forward(x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return gelu_backward(grad, *ctx.saved_tensors)


def _arguments(x: Tensor) -> dict[str, Any]:
    """What the kernels of forward and backward share."""
    return dict(
        num_rows=x.numel() // x.shape[-1],
        WIDTH=x.shape[-1],
        ROWS=TILE_BYTES // COLUMNS // x.element_size(),
        COLUMNS=COLUMNS,
        WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
    )


def _row_tiles(call: dict[str, Any]) -> int:
    return triton.cdiv(call["num_rows"], call["ROWS"])


@triton.jit(do_not_specialize=["num_rows"])
def _gelu_kernel(
    x,
    bias,
    y,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    # One number, since there may be more rows of tiles than a grid has in its second dim.
    tile, tiles = tl.program_id(0), tl.cdiv(WIDTH, COLUMNS)
    column = tile % tiles * COLUMNS + tl.arange(0, COLUMNS)
    row = tile // tiles * ROWS + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    offset = row.to(tl.int64)[:, None] * WIDTH + column[None, :]

    z = tl.load(x + offset, mask, other=0).to(WIDE) + _biases(bias, column, WIDTH, ROWS, WIDE)
    tl.store(y + offset, (z * _share(z)).to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gelu_backward_kernel(
    grad_y,
    x,
    bias,
    grad_x,
    sums,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Each program takes every n-th tile of a column of tiles, and adds up its gradients."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    biases = _biases(bias, column, WIDTH, ROWS, WIDE)
    total = tl.zeros([ROWS, COLUMNS], WIDE)

    for start in range(tl.program_id(1) * ROWS, num_rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
        offset = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        z = tl.load(x + offset, mask, other=0).to(WIDE) + biases
        grad = tl.load(grad_y + offset, mask, other=0).to(WIDE)

        share = _share(z)
        slope = 2 * _constant(ROOT, z) * (1 + 3 * _constant(CUBIC, z) * z * z)
        grad *= share + z * share * (1 - share) * slope
        tl.store(grad_x + offset, grad.to(grad_x.dtype.element_ty), mask)
        total += grad

    part = sums + tl.program_id(1) * WIDTH + column
    tl.store(part, tl.sum(total, 0), column < WIDTH)


@triton.jit
def _biases(bias, column, WIDTH: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """A tile of them, of which each thread reads its own: 128 bits at a time, no exchange."""
    at = tl.broadcast_to(column[None, :], [ROWS, column.shape[0]])
    return tl.load(bias + at, at < WIDTH, other=0).to(WIDE)


@triton.jit
def _share(z):
    """What GELU keeps of z: ``(1 + tanh(u)) / 2``, which is the sigmoid of 2 u."""
    u = _constant(ROOT, z) * (z + _constant(CUBIC, z) * z * z * z)
    return 1 / (1 + tl.exp(-2 * u))


@triton.jit
def _constant(number: tl.constexpr, like):
    """In the dtype of a tile: numbers in the code are float32."""
    return tl.full([1, 1], number, like.dtype)
