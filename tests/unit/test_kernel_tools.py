"""The tools that kernels are made and tested with, on a kernel that scales."""

from contextlib import contextmanager

import pytest
import torch
from capabilities import CAPABILITIES
from interpreter import InterpreterError, run_interpreted
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

OTHERS = [one for one in CAPABILITIES if one != 90]


def scale(dtype):
    from scaled_copy import scaled_copy

    x = torch.linspace(-1, 1, 3001, dtype=dtype, requires_grad=True)
    y = scaled_copy(x, 0.5)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_of_interpreted_kernels(dtype):
    y, grad = run_interpreted(scale, dtype)
    assert torch.equal(y, torch.linspace(-1, 1, 3001, dtype=dtype) * 0.5)
    assert torch.equal(grad, torch.full((3001,), 0.5, dtype=dtype))


def scale_empty():
    from scaled_copy import scaled_copy

    x = torch.empty(0, 3, requires_grad=True)
    scaled_copy(x, 0.5).sum().backward()
    return x.grad.shape


def test_empty_tensors():
    assert run_interpreted(scale_empty) == (0, 3)


def fail():
    raise ValueError("planted")


def test_errors_come_back():
    with pytest.raises(InterpreterError, match="planted"):
        run_interpreted(fail)


def count_in_graph():
    """Compiled: the operator is one node of forward, in one graph, and gradients are right."""
    from scaled_copy import scaled_copy

    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    backend = aot_autograd(fw_compiler=keep)

    def function(x):
        return scaled_copy(x.sin(), 2.0).sum()

    x = torch.randn(7, requires_grad=True)
    torch.compile(function, backend=backend, fullgraph=True)(x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())

    return graphs


@pytest.mark.slow
def test_one_node_of_a_compiled_graph():
    forward, backward = run_interpreted(count_in_graph)
    assert forward.count("opensora_sp.test_scaled_copy.default") == 1
    assert backward.count("opensora_sp.test_scaled_copy_backward.default") == 1


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


def launches_with(policy):
    """Of a checkpointed operator, forward and backward."""
    import scaled_copy as kernel

    kernel.scale_kernel = counted = Counted(kernel.scale_kernel)
    x = torch.randn(5, requires_grad=True)
    y = checkpoint(
        lambda x: kernel.scaled_copy(x, 3.0).sin(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(lambda *args, **options: policy),
    )
    y.sum().backward()
    torch.testing.assert_close(x.grad, 3 * (3 * x.detach()).cos())
    return counted.launches


@pytest.mark.parametrize(
    "policy, launches", [(CheckpointPolicy.MUST_SAVE, 2), (CheckpointPolicy.PREFER_RECOMPUTE, 3)]
)
def test_selective_checkpointing_keeps_or_recomputes_the_operator(policy, launches):
    assert run_interpreted(launches_with, policy) == launches


def devices_of_launches():
    """The tensors whose device is current at launches, forward and backward."""
    import scaled_copy as kernel

    current, seen = [], []

    @contextmanager
    def device_of(tensor):
        current.append(tuple(tensor.shape))
        yield
        current.pop()

    class Seen(Counted):
        def __getitem__(self, grid):
            seen.append(list(current))
            return super().__getitem__(grid)

    torch.cuda.device_of = device_of
    kernel.scale_kernel = Seen(kernel.scale_kernel)
    kernel.scaled_copy(torch.randn(5, requires_grad=True), 3.0).sum().backward()
    return seen, current


def test_kernels_are_launched_on_the_device_of_their_tensors():
    assert run_interpreted(devices_of_launches) == ([[(5,)], [(5,)]], [])


@pytest.mark.parametrize(
    "capability, dtype",
    [
        (90, torch.bfloat16),
        *(pytest.param(one, torch.bfloat16, marks=pytest.mark.slow) for one in OTHERS),
        pytest.param(90, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_builds_have_wide_accesses_and_no_spills(capability, dtype):
    from kernel_builds import builds_of
    from scaled_copy import launch

    (build,) = builds_of(launch, torch.empty(4096, dtype=dtype), 0.5, capability=capability)
    build.check(wide_loads=True, wide_stores=True)
    assert build.name == "scale_kernel" and build.grid == (4,) and 0 < build.registers < 64
    assert ("ld.global.v4" in build.ptx) and f".target sm_{capability}" in build.ptx


@pytest.mark.slow
def test_builds_depend_on_alignment():
    """An odd number of elements: the mask is no longer the same for four neighbours."""
    from kernel_builds import builds_of
    from scaled_copy import launch

    (build,) = builds_of(launch, torch.empty(4097), 0.5)
    with pytest.raises(AssertionError, match="of .* LDG have 128 bits"):
        build.check(wide_loads=True)


@pytest.mark.slow
def test_atomic_operations_are_refused():
    from kernel_builds import builds_of
    from scaled_copy import sum_with_atomics_kernel

    def launch(x, total):
        sum_with_atomics_kernel[(4,)](x, total, BLOCK=256)

    (build,) = builds_of(launch, torch.empty(1024), torch.empty(1))
    with pytest.raises(AssertionError, match="atom"):
        build.check()
