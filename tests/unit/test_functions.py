"""Operations with a backward of their own: accuracy, second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opensora_sp.models.functions import normalize, rotate

EPS = 1e-6


def plain_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotation(width: int) -> Tensor:
    angles = torch.rand(4, width // 2, dtype=torch.float64)
    cosine, sine = (z.repeat_interleave(2, dim=-1) for z in (angles.cos(), angles.sin()))
    sine[..., ::2] *= -1
    return torch.stack([cosine, sine])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_gradients_that_nearly_cancel(dtype, bound):
    """A gradient nearly parallel to x: of its two terms only their difference remains."""
    x = torch.randn(64, 72, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grad = x + 0.02 * torch.randn(64, 72, generator=torch.Generator().manual_seed(1))
    x, grad = x.to(dtype).requires_grad_(), grad.to(dtype)
    (found,) = torch.autograd.grad(normalize(x, EPS), x, grad)

    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(plain_norm(exact), exact, grad.double())
    assert (found.double() - expected).norm() < bound * expected.norm()


def test_large_gradients_do_not_overflow():
    x = torch.full((2, 72), 8.0, dtype=torch.float16)
    x[:, ::2] = 1.0
    x.requires_grad_()
    (found,) = torch.autograd.grad(normalize(x, EPS), x, torch.full_like(x, 60_000.0))
    assert found.isfinite().all()


def test_derivatives():
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    turned = rotation(8)
    for function in (lambda x: normalize(x, EPS), lambda x: rotate(x, turned)):
        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,))
