"""Attention over short rows under the stub of CUDA: kernels, memory and traffic."""

import pytest
from block_costs import OperatorBytes
from cuda_cases import cache
from cuda_stub import requires_stub, run_on_stub

pytestmark = [requires_stub, pytest.mark.slow]

FRAMES, HEADS, WIDTH = 15, 16, 72


def activation(rows):
    """Bytes of C bf16 numbers for each token."""
    return rows * FRAMES * HEADS * WIDTH * 2


def attend(setting, rows):
    """Forward and backward on the views of a projection; traffic of the operators, by phase."""
    from opensora_sp.models.kernels import set_kernels

    set_kernels(setting)
    # The first call compiles.
    forward_and_backward(1, OperatorBytes(), "first ")
    wait_until_released()
    counter = OperatorBytes()
    forward_and_backward(rows, counter, "")
    return {name: kinds["attention"] / activation(rows) for name, kinds in counter.bytes.items()}


def wait_until_released():
    """Autograd's thread may hold the gradients for a moment after backward has returned."""
    import time

    import torch

    deadline = time.monotonic() + 30
    while torch.cuda.memory_allocated():
        assert time.monotonic() < deadline, "the tensors of the first call are still allocated"
        time.sleep(0.01)


def forward_and_backward(rows, counter, prefix):
    import torch

    from opensora_sp.models.attention import attention

    shape = rows, FRAMES, 3, HEADS, WIDTH
    qkv = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    views = [z.detach().requires_grad_() for z in qkv.unbind(2)]
    grad = torch.zeros(shape[:2] + shape[3:], device="cuda", dtype=torch.bfloat16)
    with counter:
        counter.begin(f"{prefix}forward")
        out = attention(*views)
        counter.begin(f"{prefix}backward")
        grads = torch.autograd.grad(out, views, grad)
        counter.begin("end")
    del grads


def test_forward_and_backward_are_a_launch_each():
    """More rows than the second dim of a grid may have; a multiple of the allocator's 2 MB."""
    rows = 9 * 2**13
    recording = run_on_stub(attend, "triton", rows, env=cache())

    assert recording.result == {"forward": 4, "backward": 7}
    for name, results in (("forward", 1), ("backward", 3)):
        part = recording.in_phase(name)
        (launch,) = part.launches
        assert launch.name == f"_short_rows_{name}"
        assert launch.grid == (rows * HEADS // 4, 1, 1)
        assert not (part.copies or part.memsets or part.gemms or part.refused)
        # No workspace, and no sums kept for backward.
        (memory,) = part.memory
        assert memory.allocated - memory.before == results * activation(rows)


def test_flash_attention_needs_more_of_all():
    """What the kernel is there for."""
    rows = 2**13
    recording = run_on_stub(attend, "torch", rows, env=cache())

    found = recording.result
    assert found == pytest.approx({"forward": 4.03, "backward": 8.03}, abs=0.01)
    backward = recording.in_phase("backward")
    assert len(backward.launches) == 3
    # The gradients of queries in float32, rows padded to 128 and heads to 96.
    (memory,) = backward.memory
    assert memory.allocated - memory.before > 22 * activation(rows)
