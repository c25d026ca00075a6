"""Attention over short rows under the stub of CUDA: kernels and memory."""

import pytest
from cuda_cases import cache
from cuda_stub import phase, requires_stub, run_on_stub

pytestmark = [requires_stub, pytest.mark.slow]

FRAMES, HEADS, WIDTH = 15, 16, 72


def activation(rows):
    """Bytes of C bf16 numbers for each token."""
    return rows * FRAMES * HEADS * WIDTH * 2


def attend(setting, rows):
    """Forward and backward on the views of a projection."""
    from opensora_sp.models.kernels import set_kernels

    set_kernels(setting)
    # The first call compiles.
    forward_and_backward(1, "first ")
    wait_until_released()
    forward_and_backward(rows, "")


def wait_until_released():
    """Autograd's thread may hold the gradients for a moment after backward has returned."""
    import time

    import torch

    deadline = time.monotonic() + 30
    while torch.cuda.memory_allocated():
        assert time.monotonic() < deadline, "the tensors of the first call are still allocated"
        time.sleep(0.01)


def forward_and_backward(rows, prefix):
    import torch

    from opensora_sp.models.attention import attention

    shape = rows, FRAMES, 3, HEADS, WIDTH
    qkv = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    views = [z.detach().requires_grad_() for z in qkv.unbind(2)]
    grad = torch.zeros(shape[:2] + shape[3:], device="cuda", dtype=torch.bfloat16)
    phase(f"{prefix}forward")
    out = attention(*views)
    phase(f"{prefix}backward")
    grads = torch.autograd.grad(out, views, grad)
    phase("end")
    del grads


def test_forward_and_backward_are_a_launch_each():
    """More rows than the second dim of a grid may have; a multiple of the allocator's 2 MB."""
    rows = 9 * 2**13
    recording = run_on_stub(attend, "triton", rows, env=cache())

    for name, results in (("forward", 1), ("backward", 3)):
        part = recording.in_phase(name)
        (launch,) = part.launches
        assert launch.name == f"_short_rows_{name}"
        assert launch.grid == (rows * HEADS // 4, 1, 1)
        assert not (part.copies or part.memsets or part.gemms or part.refused)
        # No workspace, and no sums kept for backward.
        (memory,) = part.memory
        assert memory.allocated - memory.before == results * activation(rows)


def test_flash_attention_needs_more_memory():
    """What the kernel is there for."""
    rows = 2**13
    recording = run_on_stub(attend, "torch", rows, env=cache())

    backward = recording.in_phase("backward")
    assert len(backward.launches) == 3
    # The gradients of queries in float32, rows padded to 128 and heads to 96.
    (memory,) = backward.memory
    assert memory.allocated - memory.before > 22 * activation(rows)
