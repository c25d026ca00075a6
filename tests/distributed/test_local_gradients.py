"""Steps whose gradients are accumulated locally, against one process; ranks differ in work."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opensora_sp.plugin.local_gradients import LocalGradients

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
            hidden = hidden + checkpoint(self.aside, x, use_reentrant=False)
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
) -> tuple[Any, Any, Any]:
    """The Booster, and what it makes of a model and its optimizer."""
    from opensora_sp.plugin import SequenceParallelPlugin, plugin
    from opensora_sp.plugin._colossalai import Booster

    # It refuses fp16 on a CPU.
    plugin._check_arguments = lambda *args: None
    options = {"accumulate_locally": True, **options}
    booster = Booster(plugin=SequenceParallelPlugin(1, stage, precision, **options))
    wrapped, optimizer, *_ = booster.boost(model, optimizer)
    return booster, wrapped, optimizer


def steps(stage: int, precision: str, clips: bool, dtype: torch.dtype, **options: Any) -> Any:
    """All steps of this rank; the model, the optimizer and the EMA weights."""
    from opensora_sp.training.trainable import ShardedEma

    world, rank = dist.get_world_size(), dist.get_rank()
    model = Net(dtype)
    raw = torch.optim.SGD(model.groups(), momentum=MOMENTUM)
    max_norm = MAX_NORM if clips else 0.0
    _, _, optimizer = boosted(model, raw, stage, precision, max_norm=max_norm, **options)
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
            bound = max(rtol, 1e-7) if kind == "ema" or clips else rtol
            assert error <= bound * scale, f"{kind} of {name} differs by {error / scale}"


def parity() -> None:
    for stage in (1, 2):
        for clips in (False, True):
            follows_one_process(stage, "fp32", clips, exact=True, rtol=1e-12)
            follows_one_process(stage, "fp32", clips, rtol=5e-5)
            follows_one_process(stage, "bf16", clips, rtol=0.2)


class Numbers(nn.ParameterList):
    """Three parameters whose gradients a caller chooses."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        sizes = (5, 2, 9)
        super().__init__([nn.Parameter(torch.randn(n, generator=generator)) for n in sizes])

    def loss(self, gradient: float) -> Tensor:
        return torch.stack([(p.float() * gradient).sum() for p in self]).sum()


def numbers(stage: int, precision: str, **options: Any) -> tuple[Numbers, Any, Any, Any]:
    module = Numbers()
    how = {name: options.pop(name) for name in ("fused",) if name in options}
    raw = torch.optim.AdamW(module.parameters(), lr=0.1, **how)
    return module, *boosted(module, raw, stage, precision, **options)


def everything(optimizer: Any) -> dict[str, Tensor]:
    parts = optimizer.shards.state_parts()
    found = {name: part.tensor.clone() for name, part in parts.items()}
    weights = optimizer.shards.master_weights
    return found | {f"master/{name}": weight.clone() for name, weight in weights.items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and wanted
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def one_rank_skips_for_all(stage: int, precision: str, fused: bool | None) -> None:
    """The last rank alone has a number that is not finite, the first one no backward pass."""
    module, _, _, optimizer = numbers(
        stage, precision, fused=fused, initial_scale=64.0, hysteresis=1
    )
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    scale = optimizer.loss_scale_state()
    loss = module.loss(1.0)
    optimizer.backward(loss)
    assert bool(optimizer.step_if_finite(loss))
    before = everything(optimizer)
    for number in (math.nan, math.inf):
        if rank > 0:
            optimizer.backward(module.loss(number if rank == last else 1.0))
        # The loss is finite on all ranks.
        assert not bool(optimizer.step_if_finite(torch.zeros(())))
        assert_equal(everything(optimizer), before)
    if scale is not None:
        assert optimizer.loss_scale_state()["scale"] == scale["scale"] / 4

    # No trace of them is left in the sums.
    optimizer.backward(module.loss(1.0))
    assert bool(optimizer.step_if_finite(torch.zeros(())))


def sums_are_fp32_and_reduced_once(stage: int) -> None:
    """Small gradients that 16 bits would lose; nothing is sent before the step."""
    from opensora_sp.parallel.communication import listening

    heard: list[tuple[str, bool]] = []

    @contextmanager
    def listen(kind: str, backward: bool, device: torch.device) -> Any:
        heard.append((kind, backward))
        yield

    rank, world = dist.get_rank(), dist.get_world_size()
    module, booster, model, optimizer = numbers(stage, "bf16")
    reduce = dist.reduce_scatter_tensor
    with (
        listening(listen),
        mock.patch.object(dist, "reduce_scatter_tensor", side_effect=reduce) as sent,
    ):
        # Rank r runs r + 1 micro-batches, the first of them in no_sync.
        for number in range(rank + 1):
            gradient = 1.0 if number == 0 else 2.0**-10
            with booster.no_sync(model, optimizer):
                optimizer.backward(module.loss(gradient))
                optimizer.step()
        assert not sent.called and not heard and not any(optimizer.shards.states().values())
        norm = optimizer.clip_grad_by_norm(1e9)
        assert [call.args[1].dtype for call in sent.call_args_list] == [torch.float32]
        # 5, 2 and 9 numbers, each padded to a multiple of the ranks.
        padded = sum(-(-n // world) * world for n in (5, 2, 9))
        assert sent.call_args.args[1].numel() == padded
        assert heard == [("zero", True)]

        optimizer.step()
        assert sent.call_count == 1

    mean = 1 + 2.0**-10 * sum(range(world)) / world
    assert float(norm) == pytest.approx(4 * mean, rel=1e-6)
    with pytest.raises(RuntimeError, match="got a backward pass after the gradients"):
        optimizer.backward(module.loss(1.0))
    optimizer.zero_grad()
    optimizer.backward(module.loss(-2.0))
    optimizer.clip_grad_by_value(0.5)
    assert all((gradient[: len(gradient) - 1] == -0.5).all() for gradient in optimizer._gradients())
    optimizer.zero_grad()


def behaviour() -> None:
    for stage in (1, 2):
        for precision in ("fp32", "bf16", "fp16"):
            for fused in (None, False):
                one_rank_skips_for_all(stage, precision, fused)
        sums_are_fp32_and_reduced_once(stage)


@pytest.mark.parametrize(
    "world",
    [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)],
)
def test_steps_equal_one_process_whatever_each_rank_runs(world: int) -> None:
    run_ranks(world, parity)


def test_how_gradients_are_accumulated() -> None:
    run_ranks(2, behaviour)


def test_a_piece_of_one_column_is_sent_without_strides() -> None:
    """NCCL takes dense tensors alone; gloo copies others."""
    sent: list[Tensor] = []
    with (
        mock.patch.object(dist, "get_world_size", return_value=2),
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(dist, "reduce_scatter_tensor", lambda out, given: sent.append(given)),
    ):
        gradients = LocalGradients([nn.Parameter(torch.zeros(6))])
        gradients.sums.copy_(torch.arange(6.0).view(2, 3))
        gradients.reduce(max_elements=4)
    assert [piece.tolist() for piece in sent] == [[0, 1, 3, 4], [2, 5]]
    assert all(piece.is_contiguous() for piece in sent)
