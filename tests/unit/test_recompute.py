"""Gradient checkpointing by levels: equal gradients, the bytes that blocks keep, and the choice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from opensora_sp.config import load_train_config
from opensora_sp.models import build_model, compile_blocks
from opensora_sp.models.kernels import Kernels, using_kernels
from opensora_sp.models.recompute import EVERYTHING, OFFLOADED, levels_of
from opensora_sp.models.registry import resolve_config
from opensora_sp.parallel import Options, SequenceMesh
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.planner import run_estimator
from opensora_sp.planner.bucket_levels import BucketLevels, levels_for
from opensora_sp.planner.memory import budget_of, choose_levels
from opensora_sp.planner.trace import Activations, trace_activations
from opensora_sp.training import memory_fit

SMALL = dict(hidden_size=24, depth=2, num_heads=2, caption_channels=5, model_max_length=4)
MODELS = {
    "STDiT": dict(input_size=(3, 4, 6), mlp_ratio=2.0),
    "STDiT2": dict(qk_norm=True),
    "STDiT3": dict(qk_norm=True),
}
# Activations of a token that a block keeps on the device at each level, from OFFLOADED on, with an
# MLP of four times the width.
KEPT = (0, 1, 2, 3, 4, 7, 10, 14)
KEPT_OF_EVERYTHING = {"torch": 27, "triton": 23}


def gradients(model: torch.nn.Module, setting: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, 3, 4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 1, 4, 5, generator=generator, dtype=torch.float64)

    model.zero_grad()
    model.set_grad_checkpoint(setting)
    samples = {name: torch.ones(2, dtype=torch.float64) for name in model.sample_inputs}
    model(x, torch.tensor([900.0, 5.0]).double(), y, **samples).square().sum().backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return [x.grad, *trained]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_without_checkpointing(name):
    torch.manual_seed(0)
    model = build_model(name, **{**SMALL, **MODELS[name]}).double()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)

    expected = gradients(model, False)
    blocks = len(model.transformer_blocks)
    settings = [True, 1, "offload", range(blocks), range(OFFLOADED, blocks - 1)]
    settings += [[level] * blocks for level in range(EVERYTHING)]
    for setting in settings:
        for found, wanted in zip(gradients(model, setting), expected, strict=True):
            assert torch.equal(found, wanted), setting


def test_dropout_of_adapters_draws_the_same_again():
    torch.manual_seed(0)
    model = build_model("STDiT3", **SMALL).double()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    for block in model.transformer_blocks:
        block.mlp.fc2 = torch.nn.Sequential(torch.nn.Dropout(0.5), block.mlp.fc2)

    found = []
    for setting in (False, True, [3] * len(model.transformer_blocks)):
        torch.manual_seed(1)
        found.append(gradients(model, setting))
    for recomputed in found[1:]:
        assert all(map(torch.equal, recomputed, found[0]))


def test_compiled_blocks_keep_all_or_nothing():
    model = compile_blocks(build_model("STDiT3", **SMALL).double(), backend="eager")
    with pytest.raises(ValueError, match="got level 3 .* in compiled blocks; expected 0 or 7"):
        gradients(model, [3] * len(model.transformer_blocks))


@pytest.mark.parametrize(("ranks", "kernels"), [(1, "torch"), (2, "torch"), (1, "triton")])
def test_kept_activations(ranks, kernels):
    """In 16 bits, in units of one activation of a token; flash attention keeps its sums as well."""
    config = dataclasses.replace(resolve_config("STDiT3-XL/2"), depth=2)
    latents = (1, 4, 8, 32, 32)
    token_bytes = 8 * 16 * 16 / ranks * config.hidden_size * 2

    for level, expected in enumerate((*KEPT, KEPT_OF_EVERYTHING[kernels]), OFFLOADED):
        # What ranks share they share at every level.
        if ranks > 1 and level not in (0, 3, EVERYTHING):
            continue
        traced = trace_activations(
            "STDiT3",
            config,
            latents,
            options=Options(),
            ranks=ranks,
            dtype=torch.bfloat16,
            level=level,
            training=True,
            kernels=kernels,
        )
        assert traced.pair / 2 / token_bytes == pytest.approx(expected, rel=0.03, abs=0.01), level


def test_levels_of_settings():
    assert levels_of(True, 3) == [0, 0, 0]
    assert levels_of(False, 3) == [EVERYTHING] * 3
    assert levels_of(1, 3) == [0, EVERYTHING, EVERYTHING]
    assert levels_of(0, 2) == [EVERYTHING] * 2
    assert levels_of((0, 6, 7), 3) == [0, 6, 7]
    assert levels_of("offload", 3) == [OFFLOADED] * 3

    for setting in (4, -1, (0, 1), (0, 1, 8), (0, 1, -2)):
        with pytest.raises(ValueError, match="expected .* blocks"):
            levels_of(setting, 3)
    for setting in ("auto", "all"):
        with pytest.raises(ValueError, match=f"got grad_checkpoint='{setting}'; expected True"):
            levels_of(setting, 3)


@pytest.mark.parametrize("levels", [range(EVERYTHING + 1), (0, EVERYTHING)])
def test_the_highest_levels_that_fit(levels):
    def needed(chosen: list[int]) -> float:
        return 10.0 + sum(chosen)

    for budget in range(10, 10 + 4 * EVERYTHING + 2):
        chosen = choose_levels(needed, budget, 4, levels)
        assert len(chosen) == 4 and set(chosen) <= set(levels)
        assert needed(chosen) <= budget
        # One step more for one block would not fit, or there is none.
        lowest = min(chosen)
        higher = [level for level in levels if level > lowest]
        if higher:
            chosen[chosen.index(lowest)] = higher[0]
            assert needed(chosen) > budget

    assert choose_levels(needed, 0.0, 4, levels) == [0] * 4
    assert budget_of(80e9) == pytest.approx(73e9)


CONFIG = str(Path(__file__).parents[2] / "configs/stdit3/train/64x512x512_sp8.py")


@pytest.mark.parametrize(("compiled", "kernels"), [(True, "auto"), (False, "torch")])
def test_the_budget_follows_how_blocks_run(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, kernels: Kernels
) -> None:
    """Compiled or in eager mode, with the kernels that this process has verified."""
    traced, set_levels = [], []

    def trace(*args: Any, level: int, kernels: Kernels, **others: Any) -> Activations:
        traced.append(kernels)
        return Activations(first=0.0, pair=5e8 * (2 + level), inputs=0)

    monkeypatch.setattr(run_estimator, "trace_activations", trace)
    monkeypatch.setattr(memory_fit, "available_memory", lambda device, reserved: 80e9 - reserved)
    monkeypatch.setattr(memory_fit.dist, "get_world_size", lambda: 1)
    module: Any = SimpleNamespace(set_grad_checkpoint=set_levels.append)

    setting = "blocks" if compiled else None
    cfg = load_train_config(CONFIG, ["sp_size=1", f"compile={setting}", "grad_checkpoint=auto"])
    mesh = SequenceMesh.imagined(1, 0)
    device = torch.device("cuda")
    with using_kernels(kernels):
        budget = memory_fit.ActivationBudget(cfg, module, mesh, device, reserved=0, buckets=None)
    budget.set_levels_for(torch.Size([1, 4, 16, 64, 64]))
    assert traced and set(traced) == {kernels}
    (levels,) = set_levels
    assert (set(levels) == {0, EVERYTHING}) == compiled, levels

    # Larger than what was planned.
    traced.clear()
    budget.set_levels_for(torch.Size([1, 4, 65, 64, 64]))
    assert set_levels[1:] == [True] and not traced


def test_a_batch_takes_the_levels_of_the_smallest_planned_batch_that_contains_it():
    def planned(level: int, *sizes: int, ranks: int = 2) -> BucketLevels:
        return BucketLevels("", ranks, BatchShape(*sizes, 24, 2), [level], "")

    plans = [planned(6, 4, 8, 100), planned(3, 2, 32, 200), planned(5, 2, 16, 300)]
    plans.append(planned(1, 9, 99, 999, ranks=1))

    def levels(*sizes: int, ranks: int = 2) -> list[int] | bool:
        return levels_for(plans, BatchShape(*sizes, 24, 2), ranks)

    assert levels(4, 8, 100) == levels(1, 8, 100) == [6]
    assert levels(2, 16, 150) == [5] and levels(2, 17, 100) == [3]
    assert levels(2, 17, 201) is True and levels(5, 1, 1) is True
    assert levels(1, 1, 1, ranks=4) is True
    assert levels(5, 8, 100, ranks=1) == [1]
