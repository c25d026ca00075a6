"""Inputs of blocks on the host: equal gradients in any order of passes, buffers used again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opensora_sp.models import build_model
from opensora_sp.models.recompute import (
    OFFLOADED,
    HostMemory,
    host_memory,
    input_on_host,
)

DEPTH = 5


@pytest.fixture(autouse=True)
def memory() -> Iterator[HostMemory]:
    """The CPU's, without any buffer."""
    host_memory.cache_clear()
    yield host_memory(torch.device("cpu"))
    host_memory.cache_clear()


class Blocks:
    """Recomputed functions one after the other, each a product with its own weight."""

    def __init__(self, hosted: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hosted = hosted
        self.weights = torch.randn(DEPTH, 5, 5, generator=generator).double().requires_grad_()

    def __call__(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            if self.hosted:
                with input_on_host(x):
                    x = checkpoint(torch.matmul, x.sin(), weight, use_reentrant=False)
            else:
                x = x.sin() @ weight
        return x


def batch(number: int) -> Tensor:
    return torch.linspace(-number, 1, 4 * 3 * 5).double().reshape(4, 3, 5)


def gradient(hosted: bool, passes: Any) -> Tensor:
    blocks = Blocks(hosted)
    passes(blocks)
    assert blocks.weights.grad is not None
    return blocks.weights.grad


def one_after_the_other(blocks: Blocks) -> None:
    for number in range(3):
        blocks(batch(number)).square().sum().backward()


def last_pass_first(blocks: Blocks) -> None:
    losses = [blocks(batch(number)).square().sum() for number in range(3)]
    for loss in reversed(losses):
        loss.backward()


def first_pass_first(blocks: Blocks) -> None:
    losses = [blocks(batch(number)).square().sum() for number in range(3)]
    for loss in losses:
        loss.backward()


def a_pass_without_backward(blocks: Blocks) -> None:
    loss = blocks(batch(0)).square().sum()
    blocks(batch(1))
    loss.backward()


def backward_twice(blocks: Blocks) -> None:
    loss = blocks(batch(2)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    "passes",
    [
        one_after_the_other,
        last_pass_first,
        first_pass_first,
        a_pass_without_backward,
        backward_twice,
    ],
)
def test_gradients_are_equal_in_any_order_of_passes(passes: Any) -> None:
    assert torch.equal(gradient(True, passes), gradient(False, passes))


def test_buffers_are_used_again(memory: HostMemory) -> None:
    blocks = Blocks(hosted=True)
    for _ in range(3):
        one_after_the_other(blocks)
        a_pass_without_backward(blocks)
        gc.collect()
        # Two passes are alive at the same time; of a pass, each block but the first keeps two
        # tensors of 60 numbers, 480 bytes.
        assert {size: len(buffers) for size, buffers in memory._free.items()} == {
            512: 2 * (2 * DEPTH - 1)
        }


@pytest.mark.parametrize("next_block", [True, False], ids=["next block", "backward"])
def test_a_change_in_place_is_noticed(next_block: bool) -> None:
    """As without, where autograd notices: the copy may hold what was changed."""
    weight = torch.eye(5).double().requires_grad_()
    with input_on_host(batch(0)):
        x = batch(0) + 0
        out = checkpoint(torch.matmul, x, weight, use_reentrant=False)
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"input \(4, 3, 5\).*changed in place.*a clone"):
            if next_block:
                checkpoint(torch.matmul, out, weight, use_reentrant=False)
            else:
                out.sum().backward()


def test_levels_without_an_input_on_the_host_make_no_buffers(memory: HostMemory) -> None:
    text = dict(caption_channels=5, model_max_length=4)
    model = build_model("STDiT3", hidden_size=24, depth=2, num_heads=2, **text)
    x, y = torch.zeros(1, 4, 2, 4, 4), torch.zeros(1, 1, 4, 5)
    for setting, makes in ((False, False), (True, False), ([0, 7, OFFLOADED, 3], True)):
        model.set_grad_checkpoint(setting)
        model(x, torch.zeros(1), y).sum().backward()
        assert bool(memory._free) == makes
