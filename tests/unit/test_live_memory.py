"""The tracker of live tensor bytes, against allocations that are known."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from opensora_sp.planner.live_peak import LivePeak

N = 1000
ROW = 4 * N  # bytes of N float32

pytestmark = pytest.mark.core


def test_views_and_in_place_operations_allocate_nothing() -> None:
    with LivePeak() as live:
        a = torch.zeros(N)
        views = [a.view(10, -1), a[5:], a.expand(3, N), a.detach(), a.view(10, -1).T]
        a.mul_(2).add_(1)
        torch.add(a, 1, out=a)
        assert (live.live, live.peak) == (ROW, ROW)
        del a
        assert live.live == ROW  # a view holds the storage
        views.clear()
        assert live.live == 0


def test_a_resized_storage_counts_as_large_as_it_is() -> None:
    with LivePeak() as live:
        a = torch.empty(N)
        a.resize_(3 * N)
        assert live.live == 3 * ROW
    del a
    assert live.live == 0


def test_nested_scopes_count_for_themselves() -> None:
    with LivePeak() as outer:
        a = torch.zeros(N)
        with LivePeak() as inner:
            b = torch.zeros(2 * N)
            del a
        c = torch.zeros(N)
    assert (outer.peak, outer.live) == (3 * ROW, 3 * ROW)
    assert (inner.peak, inner.live) == (2 * ROW, 2 * ROW)
    del b, c


def chain(depth: int) -> LivePeak:
    """``depth`` times ``exp(exp(x))``: each exp keeps its result for backward."""
    x = torch.zeros(N, requires_grad=True)
    with LivePeak() as live:
        y = x * 1
        for _ in range(depth):
            y = y.exp().exp()
        loss = y.sum()
        del y
        loss.backward()
    return live


def test_forward_and_backward_of_a_known_graph() -> None:
    """Kept: two results of exp a step, the sum and its gradient.

    Backward adds a gradient and then frees a result.
    """
    for depth in (3, 7):
        assert chain(depth).peak == (2 * depth + 1) * ROW + 8


def test_fake_tensors_count_like_real_ones() -> None:
    def peak() -> int:
        net = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
        )
        with LivePeak() as live:
            net(torch.ones(32, 64)).square().sum().backward()
        return live.peak

    real = peak()
    with FakeTensorMode():
        assert peak() == real > 0
