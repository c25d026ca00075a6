"""The smallest differentiable Triton kernel, ``y = factor * x``: for tests of the tools.

Import it only under Triton's interpreter, under the stub of CUDA, or to compile it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from opensora_sp.models.kernels.triton.operator import opaque_operator

BLOCK = 1024


@triton.jit
def scale_kernel(x_ptr, y_ptr, factor, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    tl.store(y_ptr + offsets, x * factor, mask=inside)


@triton.jit
def copy_in_loop_kernel(x_ptr, y_ptr, numel, BLOCK: tl.constexpr):
    """By one program, with a number of steps that is known when it runs."""
    for step in range(0, tl.cdiv(numel, BLOCK)):
        offsets = step * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < numel)
        tl.store(y_ptr + offsets, x, mask=offsets < numel)


@triton.jit
def sum_with_atomics_kernel(x_ptr, total_ptr, BLOCK: tl.constexpr):
    """What no kernel may do: the order of the additions, and so the sum, is not determined."""
    x = tl.load(x_ptr + tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK)
    tl.atomic_add(total_ptr, tl.sum(x.to(tl.float32)))


def launch(x: Tensor, factor: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        scale_kernel[grid](x, y, factor, x.numel(), BLOCK=BLOCK, num_warps=4)
    return y


def launch_backward(grad_y: Tensor, factor: float) -> Tensor:
    return launch(grad_y, factor)


def fake(x: Tensor, factor: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


forward = opaque_operator("test_scaled_copy", launch, fake)
backward = opaque_operator("test_scaled_copy_backward", launch_backward, fake)


class _ScaledCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return forward(x, factor)

    @staticmethod
    def backward(ctx, grad):
        return backward(grad, ctx.factor), None


def scaled_copy(x: Tensor, factor: float) -> Tensor:
    return _ScaledCopy.apply(x, factor)
