"""Text encoded ahead: the same output bit for bit, and no work on it in further calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden_models import built
from golden_values import load, under

from opensora_sp.models import STDiT, STDiT2, STDiT3
from opensora_sp.models.layers import CaptionEmbedder, CrossAttention

CASES = {
    "stdit_v12_framemask": STDiT,
    "stdit2_v12_framemask": STDiT2,
    "stdit3_v12_framemask": STDiT3,
}


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_text_encoded_ahead_is_the_same_and_is_not_encoded_again(name: str) -> None:
    about, tensors = load("models", name)
    model = built(about, tensors)
    inputs = under(tensors, "input/")
    inputs["drop_caption"] = torch.arange(len(inputs["x"])) == 1
    calls = []
    for module in model.modules():
        part = {CaptionEmbedder: "y_proj", CrossAttention: "kv_linear"}.get(type(module))
        if part:
            getattr(module, part).register_forward_hook(lambda *_, part=part: calls.append(part))

    with torch.no_grad():
        wanted = model(**inputs)
        in_one_call = sorted(calls)
        calls.clear()
        text = model.encode_text(inputs.pop("y"), inputs.pop("mask"), inputs.pop("drop_caption"))
        assert sorted(calls) == in_one_call and set(calls) == {"y_proj", "kv_linear"}
        for _ in range(3):
            assert torch.equal(model(**inputs, y=text), wanted)
        assert sorted(calls) == in_one_call
        with pytest.raises(ValueError, match="expected one caption per sample"):
            model(**inputs, y=replace(text, lengths=text.lengths[:1]))
        with pytest.raises(ValueError, match="or a mask or drop_caption with it"):
            model(**inputs, y=text, mask=torch.ones(len(wanted), 5))
