"""The kernels `qk_norm` and `gelu`: values and gradients, machine code, and the layers with them.

Kernels run under Triton's interpreter. What they return is compared with the reference in float64,
on the same numbers: between the two lies one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from capabilities import CAPABILITIES
from interpreter import run_interpreted
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_sp.models.kernels import using_kernels
from opensora_sp.models.kernels.fused import linear_gelu, linear_qk_norm, qk_norm
from opensora_sp.models.layers import Mlp, SelfAttention
from opensora_sp.models.positions import RotaryEmbedding
from opensora_sp.models.token_layout import TEMPORAL, PatchGrid

# Half the distance of two neighbouring numbers; all of it in bfloat16, which the interpreter
# truncates.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
DTYPES = list(ROUNDING)
EPS = 1e-6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def derivatives(function, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The results of a function, and the gradients of its inputs."""
    inputs = [z.detach().requires_grad_() for z in inputs]
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    gradients = torch.autograd.grad(results, inputs, grads)
    return [z.detach() for z in (*results, *gradients)]


def check(kernel, reference, inputs: list[Tensor], grads: list[Tensor]) -> None:
    """One rounding lies between the kernel and the reference, in plain torch, in float64."""
    dtype = inputs[0].dtype
    found = derivatives(kernel, inputs, grads)
    wide = [[z.double() for z in tensors] for tensors in (inputs, grads)]
    with using_kernels("torch"):
        exact = derivatives(reference, *wide)
    for one, wanted in zip(found, exact, strict=True):
        assert one.dtype == dtype and one.shape == wanted.shape
        if one.numel():
            absolute = 1e-5 * wanted.abs().max().item()
            options = dict(rtol=1.01 * ROUNDING[dtype], atol=absolute)
            torch.testing.assert_close(one.double(), wanted, **options)


def rotation_of(rows: int, positions: int, width: int) -> Tensor:
    angles = 3 * normal(rows, positions, 1, width // 2, seed=5)
    angles = torch.stack([-angles, angles], dim=-1).flatten(-2)
    return torch.stack([angles.cos(), angles.sin()])


# R, L, H, D, and of the rotation: rows and positions, or None.
QK_SIZES = [
    ((3, 5, 2, 72), None),
    ((3, 5, 2, 72), (1, 5)),
    ((2, 9, 16, 72), (1, 9)),
    ((7, 3, 3, 24), (7, 3)),
    ((4, 3, 1, 10), (4, 1)),
    ((1, 1, 1, 12), (1, 1)),
    ((0, 4, 2, 72), (1, 4)),
    ((2, 0, 2, 72), None),
]


def check_qk_norm(dtype: torch.dtype) -> None:
    from opensora_sp.models.kernels.triton import qk_norm as kernel

    sizes = QK_SIZES if dtype == torch.float32 else QK_SIZES[:2]
    for (rows, length, heads, width), rotated in sizes:
        rotation = None if rotated is None else rotation_of(*rotated, width)
        qkv = normal(rows, length, 3, heads, width, seed=0)
        weights = [normal(width, seed=1), normal(width, seed=2)]
        # From what the kernel writes, the norm could not be found again.
        weights[0][0] = 0

        # As attention leaves them: by heads, dense, and within a larger tensor.
        grad_q = normal(rows, heads, length, width, seed=3).transpose(1, 2)
        grad_k = normal(rows, length, heads, width, seed=4)
        grad_v = normal(rows, length, 3, heads, width, seed=5)[:, :, 1]
        inputs = [z.to(dtype) for z in (qkv, *weights)]
        grads = [z.to(dtype) for z in (grad_q, grad_k, grad_v)]

        def exact(*args, rotation=rotation):
            rotation = None if rotation is None else rotation.double()
            return qk_norm(*args, rotation, EPS)

        def found(*args, rotation=rotation):
            return kernel.qk_norm(*args, rotation, EPS)

        # A few programs, each of which takes several tiles.
        with mock.patch.object(kernel, "MAX_PARTS", 3):
            check(found, exact, inputs, grads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm(dtype):
    run_interpreted(check_qk_norm, dtype)


def check_qk_norm_of_a_layer() -> None:
    """Sums over tokens: several tokens to a tile, one, heads with padding, and no tokens."""
    from opensora_sp.models.kernels.triton import qk_norm as kernel

    for rows, length, heads, width in ((3, 5, 2, 72), (2, 9, 16, 24), (7, 3, 3, 10), (0, 3, 1, 8)):
        inputs = [normal(rows, length, 8, seed=0)]
        inputs += [normal(3 * heads * width, 8, seed=1), normal(3 * heads * width, seed=2)]
        inputs += [normal(width, seed=3), normal(width, seed=4)]
        grads = [normal(rows, length, heads, width, seed=seed) for seed in (5, 6, 7)]
        rotation = rotation_of(1, length, width)

        def exact(*args, rotation=rotation):
            return linear_qk_norm(*args, rotation.double(), EPS)

        def found(*args, rotation=rotation):
            return kernel.linear_qk_norm(*args, rotation, EPS)

        with mock.patch.object(kernel, "MAX_PARTS", 3):
            check(found, exact, inputs, grads)


def test_qk_norm_of_a_layer():
    run_interpreted(check_qk_norm_of_a_layer)


def check_gelu(dtype: torch.dtype) -> None:
    from opensora_sp.models.kernels.triton import gelu as kernel

    sizes = [((3, 5), 72), ((70,), 7), ((2, 19), 1152), ((1,), 4608), ((0, 3), 8), ((), 5)]
    for shape, width in sizes if dtype == torch.float32 else sizes[:2]:
        x, bias = 3 * normal(*shape, width, seed=0), normal(width, seed=1)
        grad = normal(width, *shape, seed=2).movedim(0, -1)

        def exact(x, bias):
            return torch.nn.functional.gelu(x + bias, approximate="tanh")

        # One program for each column of tiles, or two.
        with mock.patch.object(kernel, "PROGRAMS", 19):
            check(kernel.gelu, exact, [x.to(dtype), bias.to(dtype)], [grad.to(dtype)])


@pytest.mark.parametrize("dtype", [DTYPES[0], pytest.param(DTYPES[1], marks=pytest.mark.slow)])
def test_gelu(dtype):
    run_interpreted(check_gelu, dtype)


def check_linear_gelu() -> None:
    from opensora_sp.models.kernels.triton import gelu as kernel

    inputs = [normal(2, 7, 24, seed=0), normal(72, 24, seed=1), normal(72, seed=2)]
    grads = [normal(2, 7, 72, seed=3)]
    check(kernel.linear_gelu, linear_gelu, inputs, grads)

    # The product with GELU of no-grad mode is for CUDA.
    inputs = [z.bfloat16() for z in inputs]
    with torch.no_grad():
        without = kernel.linear_gelu(*inputs)
    assert torch.equal(kernel.linear_gelu(*inputs), without)


def test_gelu_of_a_linear_layer():
    run_interpreted(check_linear_gelu)


def check_mixed_dtypes() -> None:
    """As under autocast: the weights of norms, and biases, stay in float32."""
    from opensora_sp.models.kernels.triton import gelu

    qkv = normal(2, 3, 3, 2, 24, seed=0).bfloat16()
    weights = [normal(24, seed=1), normal(24, seed=2)]
    ones = torch.ones(2, 3, 2, 24)
    arguments = (
        lambda *args: qk_norm(*args, None, EPS),
        [qkv, *weights],
        [ones, ones, ones.bfloat16()],
    )
    found = derivatives(*arguments)
    with using_kernels("torch"):
        wanted = derivatives(*arguments)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)

    x, bias = normal(4, 24, seed=0).bfloat16(), normal(24, seed=1)
    *_, grad_bias = derivatives(gelu.gelu, [x, bias], [torch.ones_like(x)])
    assert grad_bias.dtype == torch.float32


def test_wider_weights():
    run_interpreted(check_mixed_dtypes)


def layers() -> tuple[SelfAttention, Mlp]:
    """Over frames, with positions; weights that hide no error."""
    attention = SelfAttention(16, 2, qk_norm=True, rope=RotaryEmbedding(8)).double()
    mlp = Mlp(16, 64, 16).double()
    for i, parameter in enumerate([*attention.parameters(), *mlp.parameters()]):
        parameter.data = normal(*parameter.shape, seed=i).double()
    return attention, mlp


ROWS = PatchGrid(2, (3, 1, 3), (1, 1, 1)).rows(TEMPORAL)


def step(attention: torch.nn.Module, mlp: torch.nn.Module) -> dict[str, Tensor]:
    """Output and gradients by name, in the order in which they come."""
    found: dict[str, Tensor] = {}
    names = {}
    for layer in (attention, mlp):
        names |= {parameter: name for name, parameter in layer.named_parameters()}

    def arrive(parameter: Tensor) -> None:
        found[names[parameter]] = parameter.grad

    for parameter in names:
        parameter.register_post_accumulate_grad_hook(arrive)
    x = normal(6, 3, 16, seed=9).double().requires_grad_()
    out = mlp(attention(x, ROWS))
    out.square().sum().backward()
    return {"output": out.detach(), **found, "x": x.grad}


class OperatorNames(TorchDispatchMode):
    """The operators inside of this context, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    @property
    def kernels(self) -> list[str]:
        """Those of this file."""
        names = [name.removeprefix("opensora_sp::") for name in self.names]
        return [name for name in names if name in KERNELS]


KERNELS = ["qk_norm", "gelu", "gelu_backward", "qk_norm_backward"]


def check_layers() -> None:
    with using_kernels("torch"), OperatorNames() as plain:
        wanted = step(*layers())
    with OperatorNames() as fused:
        found = step(*layers())
    assert fused.kernels == KERNELS and not plain.kernels
    # ZeRO sums gradients over ranks in this order.
    assert list(found) == list(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)

    # In place of a layer, or watched by a hook: the layer itself is called.
    other = type("Other", (torch.nn.Linear,), {})
    attention, mlp = layers()
    mlp.fc1 = other(16, 64, dtype=torch.float64)
    attention.k_norm.register_forward_hook(lambda *args: None)
    with OperatorNames() as watched:
        step(attention, mlp)
    assert not watched.kernels

    # With hooks on the product of queries, keys and values, norms still have their kernel.
    attention, mlp = layers()
    calls = []
    attention.qkv.register_forward_hook(lambda *args: calls.append(args))
    mlp.fc1.register_full_backward_hook(lambda *args: calls.append(args))
    with OperatorNames() as watched:
        step(attention, mlp)
    assert watched.kernels == ["qk_norm", "qk_norm_backward"] and len(calls) == 2


def test_layers_with_kernels():
    run_interpreted(check_layers)


def devices_of_launches() -> list[tuple[int, ...]]:
    """The shapes of the tensors whose device is current at launches, forward and backward."""
    from opensora_sp.models.kernels.triton import gelu as kernel

    current: list[tuple[int, ...]] = []
    seen: list[tuple[int, ...]] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tuple(tensor.shape))
        yield
        current.pop()

    class Seen:
        def __init__(self, launched: Any) -> None:
            self.launched = launched

        def __getitem__(self, grid: Any) -> Any:
            seen.extend(current)
            return self.launched[grid]

    torch.cuda.device_of = device_of
    kernel._gelu_kernel = Seen(kernel._gelu_kernel)
    kernel._gelu_backward_kernel = Seen(kernel._gelu_backward_kernel)
    kernel.gelu(torch.randn(5, 3, requires_grad=True), torch.zeros(3)).sum().backward()
    return seen


def test_kernels_are_launched_on_the_device_of_their_tensors() -> None:
    assert run_interpreted(devices_of_launches) == [(5, 3), (5, 3)]


SHAPE = 8, 64, 16, 72  # R, L, H, D


def launches():
    """Calls that launch the kernels, with names of what they store in tiles."""
    from opensora_sp.models.kernels.triton import gelu, qk_norm

    (rows, length, heads, width), dtype = SHAPE, torch.bfloat16
    qkv = torch.zeros(rows, length, 3, heads, width, dtype=dtype)
    weight, rotation = torch.zeros(width, dtype=dtype), torch.zeros(2, 1, length, 1, width)
    grad = torch.zeros(SHAPE, dtype=dtype)
    for table in (None, rotation):
        arguments = qkv, weight, weight, table, EPS
        yield qk_norm._forward, arguments
        for has_bias in (False, True):
            yield qk_norm._backward, (grad, grad, grad, *arguments, has_bias)

    x, bias = torch.zeros(300, 4608, dtype=dtype), torch.zeros(4608, dtype=dtype)
    yield gelu._forward, (x, bias)
    yield gelu._backward, (x, x, bias)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code(capability):
    """No spills, no atomics, 128 bits at a time."""
    from kernel_builds import builds_of

    names = []
    for launch, arguments in launches():
        for build in builds_of(launch, *arguments, capability=capability):
            in_tiles = "backward" not in build.name and "sum" not in build.name
            build.check(wide_loads=True, wide_stores=in_tiles)
            names.append(build.name)
    assert len(names) == 13
