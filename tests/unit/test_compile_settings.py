"""``compile="blocks"`` as a setting, and the warm-up's line."""

from __future__ import annotations

import logging

import pytest
import torch

from opensora_sp.config import TrainConfig
from opensora_sp.models import build_model, compile_blocks
from opensora_sp.models.compile import reporting_compilation

SMALL = dict(hidden_size=24, depth=1, num_heads=2, caption_channels=8, model_max_length=6)


def test_blocks_are_compiled_where_asked_for_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert TrainConfig.model_fields["compile"].default is None
    model = build_model("STDiT3", **SMALL)
    assert model.run_compiled is None
    compile_blocks(model)
    assert model.run_compiled.args == ("inductor",)
    assert caplog.messages == [
        "blocks are compiled with inductor; their results are not compared with eager mode"
    ]


def test_a_warm_up_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    double = torch.compile(lambda x: 2 * x, backend="eager")
    with caplog.at_level(logging.INFO):
        for step in range(2):
            with reporting_compilation(f"step {step}"):
                double(torch.ones(3))
    (message,) = (message for message in caplog.messages if "warm-up" in message)
    assert message.startswith("step 0: warm-up of ") and "1 graphs were compiled" in message
