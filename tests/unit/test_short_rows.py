"""Attention over short rows by its Triton kernel: interpreted, and compiled for GPUs."""

import pytest
import torch
from capabilities import CAPABILITIES
from interpreter import run_interpreted

from opensora_sp.models.kernels import fused
from opensora_sp.models.kernels.fused import explicit_softmax

# Of the reference in at least float32: rounding of 16-bit results, and of the softmax's weights.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2**-9,
    torch.bfloat16: 2**-6,
}


def random_qkv(rows, length, heads, width, dtype=torch.float32):
    """Projections ``[R, T, 3, H, D]``, and a gradient ``[R, T, H, D]``."""
    generator = torch.Generator().manual_seed(rows + length)
    shape = rows, length, 3, heads, width
    qkv = torch.randn(shape, generator=generator, dtype=torch.float64)
    grad = torch.randn(shape[:2] + shape[3:], generator=generator, dtype=torch.float64)
    return qkv.to(dtype), grad.to(dtype)


def differentiated(attend, qkv, grad):
    """The result and the gradient of the projections."""
    qkv = qkv.detach().requires_grad_()
    out = attend(*qkv.unbind(2))
    return out.detach(), torch.autograd.grad(out, qkv, grad)[0]


def by_kernel(*cases):
    """Of several projections and gradients, in one process: starting one takes longer."""
    from opensora_sp.models.kernels.triton.short_rows import attend_short_rows

    return [differentiated(attend_short_rows, *case) for case in cases]


def check_cases(cases):
    """Values and gradients of the kernel are those of the reference in at least float32."""
    for (qkv, grad), found in zip(cases, run_interpreted(by_kernel, *cases), strict=True):
        wide = torch.promote_types(qkv.dtype, torch.float32)
        expected = differentiated(explicit_softmax, qkv.to(wide), grad.to(wide))
        tolerance = TOLERANCES[qkv.dtype]
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == qkv.dtype
            torch.testing.assert_close(one.to(wide), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [
        (torch.float32, (2, 5, 15, 16, 17, 30, 32)),
        pytest.param(torch.bfloat16, (5, 16, 30), marks=pytest.mark.slow),
    ],
)
def test_lengths(dtype, lengths):
    nothing = [random_qkv(0, 15, 2, 72, dtype), random_qkv(3, 15, 0, 72, dtype)]
    check_cases([*(random_qkv(5, length, 1, 72, dtype) for length in lengths), *nothing])


@pytest.mark.parametrize(
    ("dtype", "widths"),
    [
        (torch.float64, (3, 64, 96)),
        pytest.param(torch.float16, (16, 80, 128), marks=pytest.mark.slow),
    ],
)
def test_head_widths(dtype, widths):
    check_cases([random_qkv(1, 17, 5, width, dtype) for width in widths])


def test_queries_and_keys_that_autocast_leaves_wider_are_rounded_to_the_values():
    (qkv, _) = random_qkv(2, 5, 2, 16)
    q, k, v = qkv.unbind(2)
    narrow = [z.bfloat16() for z in (q, k, v)]
    found = fused.attend_short_rows(q, k, narrow[2])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, fused.attend_short_rows(*narrow))


def by_strided_views():
    """Rows lie between tokens, heads before rows, channels apart; the gradient is expanded."""
    from opensora_sp.models.kernels.triton.short_rows import attend_short_rows

    generator = torch.Generator().manual_seed(0)
    shapes = (5, 3, 2, 8), (2, 3, 5, 8), (3, 8, 5, 2)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    views = q.transpose(0, 1), k.permute(1, 2, 0, 3), v.permute(0, 2, 3, 1)
    results = []
    for function in (attend_short_rows, explicit_softmax):
        leaves = [z.detach().requires_grad_() for z in views]
        out = function(*leaves)
        out.sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return results


def test_strides():
    found, expected = run_interpreted(by_strided_views)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def of_far_rows():
    """Two rows, tokens or heads more than 2^31 numbers apart, in memory that is hardly touched."""
    from opensora_sp.models.kernels.triton.short_rows import attend_short_rows

    far, errors = 2**31 + 64, []
    memory = torch.empty(far + 128, dtype=torch.bfloat16)
    for strides in ((far, 16, 8, 1), (16, far, 8, 1), (16, 8, far, 1)):
        q = memory.as_strided((2, 2, 2, 8), strides)
        q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(0)))
        difference = attend_short_rows(q, q, q).float() - explicit_softmax(*[q.float()] * 3)
        errors.append(float(difference.abs().max()))
    return errors


def test_offsets_over_2_31():
    assert max(run_interpreted(of_far_rows)) < TOLERANCES[torch.bfloat16]


def builds(length, width, dtype, capability):
    """The forward and the backward kernel for a projection's views."""
    from kernel_builds import builds_of

    from opensora_sp.models.kernels.triton import short_rows

    q, k, v = torch.empty(3, length, 3, 16, width, dtype=dtype).unbind(2)
    grad = torch.empty(3, length, 16, width, dtype=dtype)
    (forward,) = builds_of(short_rows._forward, q, k, v, capability=capability)
    (backward,) = builds_of(short_rows._backward, grad, q, k, v, capability=capability)
    return forward, backward


def check_build(build, products, capfd):
    """No spills and no atomics, whole accesses; ``products`` of tensor cores by a warp."""
    build.check(wide_loads=True, wide_stores=True)
    assert build.count("HMMA") == products
    assert "error" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("length", "padded"), [(15, 16), (30, 32)])
def test_compiled_for_heads_of_72(capability, length, padded, capfd):
    forward, backward = builds(length, 72, torch.bfloat16, capability)

    # A product is 16 x 8 x 16; two matrix products in forward, five in backward.
    products = (padded // 16) * (padded // 8) * (80 // 16)
    check_build(forward, 2 * products, capfd)
    check_build(backward, 5 * products, capfd)
    assert forward.grid == backward.grid == (3 * 16 // 4,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "dtype"), [(128, torch.float16), (96, torch.bfloat16), (72, torch.float32)]
)
def test_compiled_for_the_most_registers(width, dtype):
    for build in builds(32, width, dtype, 80):
        build.check()
