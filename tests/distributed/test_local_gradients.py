"""Steps whose gradients are accumulated locally, against one process; ranks differ in work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

LR, MOMENTUM, MAX_NORM, DECAY, STEPS, BATCH = 0.05, 0.9, 0.3, 0.8, 3, 9
# The samples of each step's micro-batches on each rank; some have none, in one step all but one.
SHARES = {
    1: [[[4, 3, 2]], [[9]], [[1, 8]]],
    2: [[[4, 3, 2], []], [[2], [3, 4]], [[], [1, 1, 1, 6]]],
    3: [[[4, 3], [], [2]], [[], [9], []], [[1, 1, 1], [3], [2, 1]]],
}


class Net(nn.Module):
    """Parameters of odd sizes. ``aside`` works on some micro-batches; ``unused`` never does."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.aside, self.frozen = nn.Linear(5, 7), nn.Linear(7, 7)
        self.unused = nn.Parameter(torch.empty(3))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = drawn.to(dtype)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if len(x) > 2:
            hidden = hidden + self.aside(x)
        return self.last(self.frozen(hidden.tanh())).squeeze(1)

    def groups(self) -> list[dict[str, Any]]:
        """Two groups that take turns in the order of the model."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return [dict(params=trained[::2], lr=LR), dict(params=trained[1::2], lr=LR / 2)]


def samples_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 + step)
    drawn = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return drawn[:, :5], drawn[:, 5]


def micro_batches(step: int, world: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Of each rank."""
    sizes = [size for of_rank in SHARES[world][step] for size in of_rank]
    parts = iter(zip(*(drawn.split(sizes) for drawn in samples_of(step)), strict=True))
    return [[next(parts) for _ in of_rank] for of_rank in SHARES[world][step]]


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The part of these samples in the mean of the step."""
    predicted = model(x.to(next(model.parameters()).dtype))
    return (predicted.double() - target).square().sum() / BATCH


def one_process(world: int, clips: bool) -> dict[str, Tensor]:
    """Weights, momenta and EMA weights by name, from plain SGD in float64."""
    model = Net()
    optimizer = torch.optim.SGD(model.groups(), momentum=MOMENTUM)
    ema = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for step in range(STEPS):
        for of_rank in micro_batches(step, world):
            for x, target in of_rank:
                loss_of(model, x, target).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

        decay = min(DECAY, (1 + step) / (10 + step))
        for name, average in ema.items():
            average.lerp_(dict(model.named_parameters())[name].detach(), 1 - decay)
    found = {f"ema/{name}": average for name, average in ema.items()}
    for name, parameter in model.named_parameters():
        found[f"weight/{name}"] = parameter.detach()
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum is not None:
            found[f"momentum/{name}"] = momentum
    return found


def boosted(
    model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, precision: str, **options: Any
) -> Any:
    from opensora_sp.plugin import SequenceParallelPlugin, plugin
    from opensora_sp.plugin._colossalai import Booster

    # It refuses fp16 on a CPU.
    plugin._check_arguments = lambda *args: None
    options = {"accumulate_locally": True, **options}
    return Booster(plugin=SequenceParallelPlugin(1, stage, precision, **options)).boost(
        model, optimizer
    )[1]


def steps(stage: int, precision: str, clips: bool, dtype: torch.dtype, **options: Any) -> Any:
    """All steps of this rank; the model, the optimizer and the EMA weights."""
    from opensora_sp.training.ema import ShardedEma

    world, rank = dist.get_world_size(), dist.get_rank()
    model = Net(dtype)
    raw = torch.optim.SGD(model.groups(), momentum=MOMENTUM)
    max_norm = MAX_NORM if clips else 0.0
    optimizer = boosted(model, raw, stage, precision, max_norm=max_norm, **options)
    ema = ShardedEma(optimizer.shards.master_weights, DECAY)

    for step in range(STEPS):
        loss = torch.zeros(())
        for x, target in micro_batches(step, world)[rank]:
            loss = loss_of(model, x, target) * world
            optimizer.backward(loss)
            assert all(p.grad is None for p in model.parameters())
        taken = optimizer.step_if_finite(loss)
        assert bool(taken)
        ema.update(step, taken)
    return model, optimizer, ema


def follows_one_process(
    stage: int, precision: str, clips: bool, *, exact: bool = False, rtol: float = 1e-5
) -> None:
    """``exact``: float64 throughout, since the model's own weights are stepped."""
    dtype = torch.float64 if exact else torch.float32
    wanted = one_process(dist.get_world_size(), clips)
    _, optimizer, ema = steps(stage, precision, clips, dtype, master_weights=not exact)
    shards = optimizer.shards
    for name, state in shards.states().items():
        found = dict(weight=shards.master_weights[name], ema=ema.shards[name])
        found["momentum"] = state["momentum_buffer"]
        for kind, shard in found.items():
            if kind == "momentum" and name == "unused":
                # A gradient of zero, where one process has none.
                assert not shard.any()
                continue
            definition = shards.cut(name, wanted[f"{kind}/{name}"])
            scale = wanted[f"{kind}/{name}"].abs().max()
            error = (shard.double() - definition).abs().max()
            # The EMA's factor and the norm that gradients are clipped to are numbers in fp32.
            bound = max(rtol, 1e-8) if kind == "ema" or clips else rtol
            assert error <= bound * scale, f"{kind} of {name} differs by {error / scale}"


def parity() -> None:
    for stage in (1, 2):
        for clips in (False, True):
            follows_one_process(stage, "fp32", clips, exact=True, rtol=1e-12)
            follows_one_process(stage, "fp32", clips, rtol=2e-6)
            follows_one_process(stage, "bf16", clips, rtol=3e-2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_steps_equal_one_process_whatever_each_rank_runs(world: int) -> None:
    run_ranks(world, parity)
