"""The loss scale on the device follows ColossalAI's, whose rule needs the host."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from opensora_sp.plugin.loss_scale import LossScale
from opensora_sp.plugin.process_group import use_cpu_if_nothing_else


def colossalai_scaler(**options: Any) -> Any:
    from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler

    use_cpu_if_nothing_else()
    return DynamicGradScaler(initial_scale=64.0, **options)


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("limits", [{}, dict(min_scale=16.0, max_scale=128.0)])
def test_scale_and_counts_follow_colossalai(hysteresis: int, limits: dict[str, float]) -> None:
    draw = random.Random(hysteresis)
    theirs = colossalai_scaler(growth_interval=3, hysteresis=hysteresis, **limits)
    ours, seen = LossScale(theirs, lambda: torch.tensor(False)), set()
    for _ in range(60):
        overflow = draw.random() < 0.3
        theirs.update(overflow)
        ours.update(torch.tensor(overflow))

        state = ours.state()
        assert state["scale"] == theirs.scale.item()
        assert state["growth"] == theirs._growth_step
        assert state["hysteresis"] == theirs._hysteresis_step
        seen.add(state["scale"])
    assert len(seen) > 2


def test_a_saved_state_is_restored_as_json_numbers() -> None:
    scale = LossScale(colossalai_scaler(hysteresis=2), lambda: torch.tensor(False))
    saved = {"scale": 32.0, "growth": 5, "hysteresis": 1}
    scale.load(saved)
    assert scale.state() == saved and isinstance(scale.state()["growth"], int)

    # The second overflow lowers the scale.
    scale.update(torch.tensor(True))
    assert scale.loss_scale == 16.0
