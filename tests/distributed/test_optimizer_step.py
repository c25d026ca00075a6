"""The fused step against AdamW, clipping and EMA by their definitions, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

STEPS, MAX_NORM, DECAY = 5, 3.0, 0.9
OPTIONS = [
    dict(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
    dict(lr=0.02, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0),
]
SHAPES = [(7, 5), (3,), (4, 4, 2), (1,), (11,), (40, 9)]
UNUSED = "3"


class Parameters(nn.ParameterDict):
    """Parameters of odd sizes, whose gradients a caller chooses."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
        super().__init__({str(i): nn.Parameter(x.to(dtype)) for i, x in enumerate(drawn)})

    def loss(self, gradients: dict[str, Tensor]) -> Tensor:
        terms = [(self[name] * gradient).sum() for name, gradient in gradients.items()]
        return torch.stack([term.float() for term in terms]).sum()

    def groups(self) -> list[dict[str, Any]]:
        """Two groups that take turns in the order of the model."""
        parameters = list(self.values())
        return [dict(params=parameters[i::2], **OPTIONS[i]) for i in range(2)]


def gradients_of(step: int) -> dict[str, Tensor]:
    """Numbers that bf16 represents; the parameter UNUSED has none."""
    generator = torch.Generator().manual_seed(step)
    scale = 0.01 if step == 1 else 1.0
    drawn = {
        str(i): (torch.randn(shape, generator=generator) * scale).bfloat16().float()
        for i, shape in enumerate(SHAPES)
    }
    drawn.pop(UNUSED)
    return drawn


def as_defined() -> Iterator[dict[str, dict[str, Tensor]]]:
    """After each step, of each parameter: weight, both moments and EMA weight, in float64."""
    options = {str(i): OPTIONS[i % 2] for i in range(len(SHAPES))}
    weights = {name: p.detach().double() for name, p in Parameters().items()}
    state = {
        name: dict(weight=w, ema=w.clone(), exp_avg=0 * w, exp_avg_sq=0 * w)
        for name, w in weights.items()
    }
    for step in range(STEPS):
        gradients = {name: g.double() for name, g in gradients_of(step).items()}
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        for name, gradient in gradients.items():
            clipped = gradient * min(1.0, MAX_NORM / (norm + 1e-6))
            adamw(state[name], clipped, step + 1, **options[name])

        decay = min(DECAY, (1 + step) / (10 + step))
        for of in state.values():
            of["ema"] = decay * of["ema"] + (1 - decay) * of["weight"]
        yield state


def adamw(
    of: dict[str, Tensor],
    gradient: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    of["exp_avg"] = betas[0] * of["exp_avg"] + (1 - betas[0]) * gradient
    of["exp_avg_sq"] = betas[1] * of["exp_avg_sq"] + (1 - betas[1]) * gradient**2
    first, second = (
        of["exp_avg"] / (1 - betas[0] ** step),
        of["exp_avg_sq"] / (1 - betas[1] ** step),
    )
    of["weight"] = of["weight"] * (1 - lr * weight_decay) - lr * first / (second.sqrt() + eps)


def boosted(
    stage: int, precision: str, *, max_norm: float = MAX_NORM, **how: Any
) -> tuple[Parameters, Any, Any]:
    from opensora_sp.plugin import SequenceParallelPlugin, plugin
    from opensora_sp.plugin._colossalai import Booster
    from opensora_sp.training.trainable import ShardedEma

    # It refuses fp16 on a CPU.
    plugin._check_arguments = lambda *args: None
    kind = SequenceParallelPlugin(1, stage, precision, max_norm, initial_scale=64.0, hysteresis=1)
    module = Parameters()
    raw = torch.optim.AdamW(module.groups(), **how)
    _, optimizer, *_ = Booster(plugin=kind).boost(module, raw)
    return module, optimizer, ShardedEma(optimizer.shards.master_weights, DECAY)


def one_step(module: Parameters, optimizer: Any, ema: Any, step: int, **change: float) -> Tensor:
    """A step in two micro-batches, with the loss's average over the ranks."""
    gradients = gradients_of(step)
    for name, number in change.items():
        gradients[name].view(-1)[-1] = number
    halves = {name: g / 2 for name, g in gradients.items()}
    for _ in range(2):
        loss = module.loss(halves)
        optimizer.backward(loss)
    taken = optimizer.step_if_finite(loss)
    ema.update(step, taken)
    return taken


def follows_the_definition(stage: int, precision: str) -> None:
    module, optimizer, ema = boosted(stage, precision)
    assert optimizer.is_fused
    shards = optimizer.shards
    for step, wanted in enumerate(as_defined()):
        assert bool(one_step(module, optimizer, ema, step))
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients_of(step).values()))
        assert float(optimizer.get_grad_norm()) == pytest.approx(norm, rel=1e-6)

        for name, state in shards.states().items():
            master = shards.master_weights[name]
            found = dict(weight=master, ema=ema.shards[name])
            found |= {kind: state[kind] for kind in state if kind != "step"}
            for kind, shard in found.items():
                exact = shards.cut(name, wanted[name][kind]).double()
                torch.testing.assert_close(shard.double(), exact, rtol=2e-6, atol=1e-6)
            whole = shards.whole(name, master).to(module[name].dtype)
            assert torch.equal(module[name].data, whole), name
        assert not shards.states()[UNUSED]
        assert {float(state["step"]) for state in shards.states().values() if state} == {step + 1}


def everything(module: Parameters, optimizer: Any, ema: Any) -> dict[str, Tensor]:
    found = {f"weight/{name}": p.detach().clone() for name, p in module.items()}
    found |= {f"ema/{name}": shard.clone() for name, shard in ema.shards.items()}
    found |= {f"master/{n}": shard.clone() for n, shard in optimizer.shards.master_weights.items()}
    parts = optimizer.shards.state_parts()
    return found | {name: part.tensor.clone() for name, part in parts.items()}


def skips_what_is_not_finite(stage: int, precision: str, fused: bool | None) -> list[bool]:
    """The last rank alone has a gradient, or a loss, that is not finite."""
    module, optimizer, ema = boosted(stage, precision, fused=fused)
    assert optimizer.is_fused is (fused is not False)
    scale = optimizer.loss_scale_state()
    one_step(module, optimizer, ema, 0)
    is_last, taken = dist.get_rank() == dist.get_world_size() - 1, []
    for number in (math.nan, math.inf, -math.inf):
        before = everything(module, optimizer, ema)
        change = {"5": number} if is_last else {}
        taken.append(bool(one_step(module, optimizer, ema, 1, **change)))
        assert not any(p.grad is not None for p in module.values())

        after = everything(module, optimizer, ema)
        assert before.keys() == after.keys() and len(before) == 6 * 3 + 5 * 3
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name
        assert float(optimizer.get_grad_norm()) > 0

    if scale is not None:
        # An overflow each, at a hysteresis of one.
        assert optimizer.loss_scale_state()["scale"] == scale["scale"] / 8
    taken.append(bool(one_step(module, optimizer, ema, 1)))
    changed = everything(module, optimizer, ema)
    assert not torch.equal(changed["master/5"], before["master/5"])
    return taken


def clips_before_the_step(stage: int, precision: str) -> None:
    """Gradients in fp16 are larger by the loss scale, of which norms and limits know nothing."""
    limit = 0.5
    gradients = {name: g.double() for name, g in gradients_of(0).items()}
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
    for clips in ("norm", "value"):
        module, optimizer, _ = boosted(stage, precision, max_norm=0.0)
        optimizer.backward(module.loss(gradients_of(0)))
        if clips == "norm":
            assert optimizer.clip_grad_by_norm(MAX_NORM).item() == pytest.approx(norm, rel=1e-3)
        else:
            optimizer.clip_grad_by_value(limit)
        optimizer.step()

        states = optimizer.shards.states()
        for name, gradient in gradients.items():
            clipped = gradient.clamp(-limit, limit)
            wanted = gradient * MAX_NORM / norm if clips == "norm" else clipped
            first = states[name]["exp_avg"].double() / (1 - OPTIONS[int(name) % 2]["betas"][0])
            exact = optimizer.shards.cut(name, wanted).double()
            torch.testing.assert_close(first, exact, rtol=1e-2, atol=1e-3)


def is_chosen_by_a_rule() -> None:
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    def is_fused(kind: type = torch.optim.AdamW, options: Any = None, **how: Any) -> bool:
        plugin = SequenceParallelPlugin(1, 1, "bf16", **(options or {}))
        module = Parameters()
        _, optimizer, *_ = Booster(plugin=plugin).boost(module, kind(module.parameters(), **how))
        for _ in range(2):
            optimizer.backward(module.loss(gradients_of(0)))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.is_fused

    assert is_fused() and is_fused(torch.optim.Adam) and is_fused(fused=True)
    assert is_fused(amsgrad=True) and is_fused(maximize=True)
    assert not is_fused(fused=False) and not is_fused(foreach=True)
    assert not is_fused(torch.optim.SGD, lr=0.1)
    assert not is_fused(options=dict(master_weights=False))


def all_of(stages: tuple[int, ...] = (1, 2)) -> list[Any]:
    taken = []
    for stage in stages:
        for precision in ("fp32", "bf16"):
            follows_the_definition(stage, precision)
        for precision in ("fp32", "bf16", "fp16"):
            for fused in (None, False):
                taken.append(skips_what_is_not_finite(stage, precision, fused))
        for precision in ("fp32", "fp16"):
            clips_before_the_step(stage, precision)
    is_chosen_by_a_rule()
    return taken


# The mean over two ranks of equal gradients is exact in bf16.
@pytest.mark.parametrize("world", [1, 2])
def test_the_fused_step(world: int) -> None:
    for taken in run_ranks(world, all_of):
        assert taken == [[False, False, False, True]] * 12
