"""``compile="blocks"`` as a setting."""

from __future__ import annotations

import pytest

from opensora_sp.config import TrainConfig
from opensora_sp.models import build_model, compile_blocks

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
