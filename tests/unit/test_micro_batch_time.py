"""Predicted seconds of micro-batches: against traced operators, and how they grow with work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from opensora_sp.models.registry import resolve_config
from opensora_sp.parallel import Options
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CPU, H100, PRESETS, CostModel
from opensora_sp.planner.micro_batch_time import ModelCosts, seconds_of
from opensora_sp.planner.step_time import OPTIMIZER, ZERO, predict_step

Latents = tuple[int, int, int, int, int]
XL2: Any = dataclasses.replace(resolve_config("STDiT3-XL/2"), depth=4)
COSTS = ModelCosts.of("STDiT3", XL2)
# ``(B, c, frames, height, width)``: an image, many images, clips short and long.
IMAGE, IMAGES, SHORT, LONG = (
    (1, 4, 1, 64, 64),
    (20, 4, 1, 64, 64),
    (4, 4, 15, 40, 40),
    (1, 4, 32, 64, 64),
)


def seconds(
    latents: Latents, ranks: int, cost_model: CostModel = H100, config: Any = XL2, **options: Any
) -> float:
    in_group = Options(cost_model=cost_model, spans_nodes=options.pop("spans_nodes", False))
    options = {"model": COSTS, "element_size": 2, **options}
    shape = BatchShape.of(config, latents[0], latents[2:])
    return seconds_of(shape, in_group, ranks, **options)


def traced(
    latents: Latents, ranks: int, cost_model: CostModel, config: Any = XL2, name: str = "STDiT3"
) -> float:
    """Seconds by the planner's trace, without the optimizer's step, everything recomputed."""
    step = predict_step(
        name,
        config,
        latents,
        gpu=cost_model,
        options=Options(cost_model=cost_model),
        ranks=ranks,
        world=1,
        dtype=torch.bfloat16,
        levels=[0],
    )
    work = [one for kind, one in step.work.items() if kind not in (OPTIMIZER, ZERO)]
    operators = sum(one.operators for one in work)
    return cost_model.with_launches(sum(one.seconds for one in work), operators)


@pytest.mark.parametrize(
    "preset",
    ["H100", *(pytest.param(name, marks=pytest.mark.slow) for name in PRESETS if name != "H100")],
)
def test_seconds_are_those_of_the_trace(preset):
    """Within 13 % for each of several sizes and degrees, so ratios agree within 30 %."""
    rates = PRESETS[preset]
    for latents, ranks in ((IMAGES, 1), (IMAGES, 4), (SHORT, 8), (LONG, 1), (LONG, 8)):
        predicted = seconds(latents, ranks, rates, recomputed=1.0)
        assert predicted / traced(latents, ranks, rates) == pytest.approx(1, abs=0.13)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["STDiT", "STDiT2"])
def test_seconds_of_other_models_are_those_of_the_trace(name):
    config: Any = dataclasses.replace(resolve_config(f"{name}-XL/2"), depth=4)
    if name == "STDiT":
        config = dataclasses.replace(config, input_size=SHORT[2:])
    costs = ModelCosts.of(name, config)
    for ranks in (1, 8):
        predicted = seconds(SHORT, ranks, config=config, model=costs, recomputed=1.0)
        assert predicted / traced(SHORT, ranks, H100, config, name) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("preset", PRESETS)
def test_more_work_takes_longer(preset):
    rates = PRESETS[preset]
    # None is bound by launches, which grow with nothing.
    grown = ((1, 4, 16, 64, 64), (2, 4, 16, 64, 64), (2, 4, 32, 64, 64), (2, 4, 32, 96, 96))
    for ranks in (1, 2, 4):
        times = [seconds(latents, ranks, rates) for latents in grown]
        assert times == sorted(times) and times[0] < times[-1]

    assert seconds(LONG, 1, rates) < seconds(LONG, 1, rates, recomputed=0.5)
    assert seconds(LONG, 1, rates, training=False) < seconds(LONG, 1, rates) / 2


def test_more_ranks_help_large_batches_and_not_small_ones():
    assert seconds(LONG, 8) < seconds(LONG, 4) < seconds(LONG, 2) < seconds(LONG, 1)
    # An image is bound by launches, which each rank has; exchanges come on top.
    assert seconds(IMAGE, 8) > seconds(IMAGE, 1)
    # Where ranks divide the batch, nothing is sent, so a slower link changes nothing.
    slow = dataclasses.replace(H100, bandwidth=1e9)
    assert seconds(SHORT, 4, slow) == seconds(SHORT, 4)
    assert seconds(LONG, 4, slow) > seconds(LONG, 4)


def test_the_busiest_rank_counts():
    """Of 5 frames on 4 ranks one holds two, as each does of 8: in blocks that never leave them."""
    spatial = dataclasses.replace(XL2, skip_temporal=True)
    five, eight, four = (
        seconds((1, 4, frames, 96, 96), 4, config=spatial, recomputed=1.0) for frames in (5, 8, 4)
    )
    assert five == pytest.approx(eight) and five > 1.2 * four


def test_groups_that_span_nodes_take_longer():
    assert seconds(LONG, 8, spans_nodes=True) > seconds(LONG, 8)
    assert seconds(SHORT, 4, spans_nodes=True) == seconds(SHORT, 4)


def test_a_cpu_launches_and_computes_in_turn():
    assert CPU.with_launches(1.0, 1000) == 1.0 + 1000 * CPU.launch
    assert H100.with_launches(1.0, 1000) == 1.0
    assert H100.with_launches(0.0, 1000) == 1000 * H100.launch
