"""The smallest Triton kernels, copies: the interpreter is tested on them before others."""

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def launch(x: Tensor, factor: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), BLOCK),)
        scale_kernel[grid](x, y, factor, x.numel(), BLOCK=BLOCK, num_warps=4)
    return y
