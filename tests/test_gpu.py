"""What only a GPU can show. Needs torch and einops; the plugin's part needs ColossalAI as well."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from test_golden_models import CASES, close, load, under

from opensora_sp.models import build_model
from opensora_sp.models.attention import _sdpa, attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("name", CASES)
def test_golden_output_on_cuda(name: str) -> None:
    about, tensors = load("models", name)
    model = build_model("STDiT3", **about["constructor"])
    model.load_state_dict(under(tensors, "state/"), strict=True)
    inputs = {key: value.cuda() for key, value in under(tensors, "input/").items()}
    close(model.cuda()(**inputs).cpu(), tensors["output"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision(dtype: torch.dtype) -> None:
    """Whatever backend is chosen, rows and packed tokens, forward and backward, against float32."""
    for shape, lengths in [
        ((30, 100, 4, 72), None),
        ((120, 4, 72), ([50, 0, 70], [60, 20, 40])),
        ((0, 9, 4, 72), None),
    ]:
        exact = [torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3)]
        half = [z.detach().to(dtype).requires_grad_() for z in exact]
        wanted, found = _sdpa(*exact, lengths), attention(*half, lengths=lengths)
        torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
        wanted.square().sum().backward()
        found.float().square().sum().backward()
        for a, b in zip(half, exact, strict=True):
            torch.testing.assert_close(a.grad.float(), b.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_boosted_step(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("colossalai") is None:
        pytest.skip("no ColossalAI")
    from opensora_sp.plugin import SequenceParallelPlugin, launch
    from opensora_sp.plugin._colossalai import Booster

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    launch(seed=0)
    model = build_model("STDiT3", hidden_size=144, depth=2, num_heads=2, caption_channels=8, model_max_length=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = SequenceParallelPlugin(precision=precision, max_norm=1.0)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    x, y = torch.randn(2, 4, 5, 8, 8, device="cuda"), torch.randn(2, 1, 6, 8, device="cuda")
    losses = []
    for _ in range(20):
        loss = (model(x, torch.tensor([100.0, 900.0], device="cuda"), y)[:, :4] - x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
