"""Ranks that share a batch hold the same model, or all raise the same error before any exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_models import TINY
from torch import Tensor, nn

from opensora_sp.models import build_model
from opensora_sp.parallel import CommLedger, SequenceMesh, ShardPlan, parallelize, register_plan

MODEL = dict(TINY, num_heads=2, pred_sigma=False)


def make_model(kind: str = "STDiT3", **options: Any) -> Any:
    torch.manual_seed(0)
    return build_model(kind, **MODEL | options)


def frozen(pattern: str) -> Any:
    model = make_model()
    for name, parameter in model.named_parameters():
        if pattern in name:
            parameter.requires_grad_(False)
    return model


# What one rank builds instead of ``make_model()``, and what the error names first.
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "class": (lambda: make_model("STDiT2"), "the class is opensora_sp.models"),
    "depth": (lambda: make_model(depth=3), "config.depth is"),
    "width": (lambda: make_model(hidden_size=48), "config.hidden_size is"),
    "heads": (lambda: make_model(num_heads=6), "config.num_heads is"),
    "dtype": (lambda: make_model().double(), "parameter x_embedder.proj.weight is"),
    "one dtype": (lambda: halved(make_model()), "parameter spatial_blocks.1.attn.proj.bias is"),
    "frozen": (
        lambda: frozen("temporal_blocks.0"),
        "parameter temporal_blocks.0.scale_shift_table is",
    ),
}


def halved(model: Any) -> Any:
    proj = model.spatial_blocks[1].attn.proj
    proj.bias = nn.Parameter(proj.bias.detach().bfloat16())
    return model


def inputs() -> dict[str, Tensor]:
    return dict(x=torch.zeros(1, 2, 5, 6, 8), timestep=torch.ones(1), y=torch.zeros(1, 1, 6, 5))


def error_of(model: Any, **kwargs: Any) -> str:
    """The message of a model's first call, which sends nothing but the comparison."""
    with (
        CommLedger() as counter,
        pytest.raises(ValueError, match="got different models on the ranks") as error,
    ):
        model(**kwargs)
    assert set(counter.calls) == {("check", "forward")}
    return str(error.value)


def refused() -> dict[tuple[str, int, bool], str]:
    mesh = SequenceMesh(dist.get_world_size())
    reported = {}
    for name, (build_other, _) in OTHERS.items():
        for odd in (0, mesh.sp_size - 1):
            for verify in (False, True):
                model = build_other() if mesh.sp_rank == odd else make_model()
                parallelize(model, mesh, verify=verify)
                reported[name, odd, verify] = error_of(model, **inputs())
    parallelize(make_model(), mesh)(**inputs())  # the group can still be used
    return reported


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_with_another_model_is_named_on_all_ranks(world: int) -> None:
    first, *others = run_ranks(world, refused)
    assert others == [first] * (world - 1)
    for (name, odd, _), message in first.items():
        assert f"sequence-parallel group: {OTHERS[name][1]}" in message, message
        usual = [rank for rank in range(world) if rank != odd]
        for ranks in ([odd], usual):
            assert (f"on ranks {ranks}" if len(ranks) > 1 else f"on rank {ranks[0]}") in message
        assert "expected the same class" in message and "alike on every rank" in message
    depth, dtype = first["depth", 0, False], first["frozen", world - 1, False]
    assert "config.depth is 3 on rank 0, 2 on rank" in depth
    assert f"[6, 24] float32 frozen on rank {world - 1}" in dtype


def refrozen() -> list[str]:
    """A model that one rank freezes, or thaws, in the middle of a training."""
    mesh = SequenceMesh(dist.get_world_size())
    model, odd = parallelize(make_model(), mesh), mesh.sp_size - 1
    reported = []
    model(**inputs())
    for trainable in (False, True):
        weight = model.spatial_blocks[0].mlp.fc1.weight
        if mesh.sp_rank == odd:
            weight.requires_grad_(trainable)
        reported.append(error_of(model, **inputs()))
        weight.requires_grad_(trainable)
        model(**inputs())
    return reported


@pytest.mark.parametrize("world", [2, 3])
def test_trainability_is_compared_again_when_it_changes(world: int) -> None:
    first, *others = run_ranks(world, refrozen)
    assert others == [first] * (world - 1)
    for message, state in zip(first, ("frozen", "trainable"), strict=True):
        assert "parameter spatial_blocks.0.mlp.fc1.weight is" in message
        assert f"float32 {state} on rank {world - 1}" in message


class Frames(nn.Module):
    """A model that knows nothing of this package."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.spatial, self.temporal, self.leave = (nn.Identity() for _ in range(4))
        self.linear = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.temporal(self.spatial(self.enter(x)))) @ self.linear.weight.T


def models_of_others() -> tuple[str, str]:
    """A model with a plan; and one that goes to the Booster, in replicas of one rank."""
    mesh = SequenceMesh(dist.get_world_size())
    register_plan(
        Frames,
        ShardPlan(enter="enter", spatial=("spatial",), temporal=("temporal",), leave="leave"),
    )
    model = parallelize(Frames(4 + mesh.sp_rank), mesh)
    planned = error_of(model, x=torch.zeros(1, 2, 3, 4))

    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    model = frozen("t_block" if mesh.rank else "nothing")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(ValueError, match="got different models on the ranks of the run") as error:
        Booster(plugin=SequenceParallelPlugin(sp_size=1, precision="fp32")).boost(model, optimizer)
    return planned, str(error.value)


def test_models_of_others_and_of_replicas_are_compared() -> None:
    first, second = run_ranks(2, models_of_others)
    assert first == second
    planned, boosted = first
    assert (
        "parameter linear.weight is [4, 4] float32 trainable on rank 0, [5, 4] float32" in planned
    )
    difference = "[144, 24] float32 trainable on rank 0, [144, 24] float32 frozen"
    assert f"parameter t_block.1.weight is {difference}" in boosted
    assert "(and 1 more entry)" in boosted
