"""``loss_weight``: the mean that a step's micro-batches are weighed by, against its definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.diffusion.loss import samples_of_mean

WORLD = 3
# Samples of the micro-batches of each rank; one has none, and runs one of zeros.
SHARES = [[4, 1], [2], []]


def micro_batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, size, 2, 1, 3, 2, generator=generator, dtype=torch.float64)
    return x, target


def losses_of(weight: Tensor, size: int, seed: int) -> Tensor:
    x, target = micro_batch(size, seed)
    return velocity_loss((x * weight).sin(), target)


def mean_over_samples(losses: list[Tensor]) -> Tensor:
    return torch.cat(losses).mean()


def mean_over_micro_batches(losses: list[Tensor]) -> Tensor:
    return torch.stack([of_one.mean() for of_one in losses]).mean()


DEFINITIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sample": mean_over_samples,
    "micro_batch": mean_over_micro_batches,
}


def defined(name: str) -> Tensor:
    """The gradient of the step's loss on one process."""
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    sizes = [size for of_rank in SHARES for size in of_rank]
    losses = [losses_of(weight, size, seed) for seed, size in enumerate(sizes)]
    DEFINITIONS[name](losses).backward()
    return weight.grad


def mean_over_ranks(name: str) -> Tensor:
    """The mean of the ranks' gradients, as ZeRO takes it."""
    gradients, seed = [], 0
    sizes = [size for of_rank in SHARES for size in of_rank]
    for of_rank in SHARES:
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        for size in of_rank or [0]:
            # An idle rank runs one sample of zeros, whose loss does not count.
            losses = losses_of(weight, max(size, 1), seed) * min(size, 1)
            samples = samples_of_mean(name, micro_batch=size, sizes=sizes)
            rank_loss(losses, global_samples=samples, world_size=WORLD).backward()
            seed += min(size, 1)
        gradients.append(weight.grad)
    return torch.stack(gradients).mean()


@pytest.mark.parametrize("name", list(DEFINITIONS))
def test_the_mean_of_the_ranks_gradients_is_that_of_the_definition(name: str) -> None:
    torch.testing.assert_close(mean_over_ranks(name), defined(name), rtol=1e-13, atol=0)
    # A control: the other definition differs.
    other = defined({"sample": "micro_batch", "micro_batch": "sample"}[name])
    assert abs(mean_over_ranks(name) / other - 1) > 1e-3


def test_weights_are_equal_where_micro_batches_are() -> None:
    found = {name: samples_of_mean(name, micro_batch=2, sizes=[2, 2, 2]) for name in DEFINITIONS}
    assert found == {"sample": 6, "micro_batch": 6}
