"""Int8 weights of a frozen base: the product is the dequantised base's; what the planner counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from random_weights import draw_weights
from torch import nn

from opensora_sp.common import importing
from opensora_sp.config.sections import Lora
from opensora_sp.models import build_model
from opensora_sp.models.lora import add_lora
from opensora_sp.models.quantized import Int8Linear, quantize_blocks, stored_tensors
from opensora_sp.planner.memory import FP32, ModelSizes, Persistent, Zero
from opensora_sp.training.trainable import DropoutDraws

COMMON = dict(
    hidden_size=24, depth=2, num_heads=3, caption_channels=5, model_max_length=6, mlp_ratio=2.0
)
LAYERS = 4 * 7


def made() -> nn.Module:
    return draw_weights(build_model("STDiT3", **COMMON), std=0.2)


def dequantised(model: nn.Module) -> nn.Module:
    """A model whose weights are the numbers that a quantised one's int8 weights stand for."""
    bare = made()
    names = dict(model.named_modules())
    for name, module in bare.named_modules():
        if isinstance(names[name], Int8Linear):
            module.weight.data = names[name].weight.dequantize()
    return bare


def gradients(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output, and gradients of the adapters."""
    model = model.to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 3, 4, 4, generator=generator).to(dtype)
    y = torch.randn(2, 1, 6, 5, generator=generator).to(dtype)
    numbers = {name: torch.full((2,), 24.0) for name in model.sample_inputs}
    out = model(x, torch.tensor([300.0, 700.0]), y, **numbers)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.float().square().mean(), trained)]


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}])
@pytest.mark.parametrize("level", [True, False])
def test_forward_and_gradients_are_those_of_the_dequantised_base(
    kind: dict[str, bool], *, level: bool
) -> None:
    """In fp32 to rounding, and as close in bf16; also where blocks are recomputed."""
    base = made()
    quantize_blocks(base)
    assert sum(isinstance(module, Int8Linear) for module in base.modules()) == LAYERS
    models = base, dequantised(base)
    for model in models:
        torch.manual_seed(0)
        add_lora(model, rank=3, alpha=5.0, targets=["*.attn.*", "*blocks.*.fc1"], **kind)
        draw_trained(model)
        model.set_grad_checkpoint(level)
    for dtype, atol in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        ours, theirs = (gradients(model, dtype) for model in models)
        assert len(ours) == 1 + 4 * 3 * (3 if kind else 2)
        for got, expected in zip(ours, theirs, strict=True):
            scale = expected.abs().max().item()
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol * scale)


def draw_trained(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)


def test_backward_keeps_the_int8_weight_alone() -> None:
    layer = nn.Sequential(nn.Linear(64, 32))
    layer.register_module("spatial_blocks", nn.ModuleList([nn.Linear(32, 48)]))
    exact = layer.spatial_blocks[0].weight.detach().clone()
    quantize_blocks(layer)
    (quantised,) = layer.spatial_blocks
    assert type(layer[0]) is nn.Linear
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(5, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = quantised(x)
    assert [type(tensor).__name__ for tensor in saved] == ["Int8Tensor"]
    weight = quantised.weight.dequantize()
    assert torch.equal(out, F.linear(x, weight, quantised.bias))
    # Rounding is relative to the largest number of a row.
    scale = quantised.weight.scale
    assert quantised.weight.qdata.dtype == torch.int8 and scale.shape == (48, 1)
    torch.testing.assert_close(scale[:, 0], exact.abs().amax(dim=1) / 127.5, rtol=1e-6, atol=0)
    assert bool(((weight - exact).abs() <= 0.51 * scale).all())


def test_an_adapted_layer_compiles_into_one_graph_with_its_dropout() -> None:
    model = made()
    quantize_blocks(model)
    add_lora(model, rank=3, alpha=5.0, dropout=0.5)
    draw_trained(model)
    layer = model.spatial_blocks[0].mlp.fc2
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 48, requires_grad=True)
    for seed in (0, 1):
        DropoutDraws(model, seed).draw(0)
        got, expected = (torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, layer))
        torch.testing.assert_close(got, expected)


def test_a_cast_leaves_int8_weights() -> None:
    model = made()
    quantize_blocks(model)
    before = stored_tensors(model.spatial_blocks[0].mlp.fc1.weight)
    model.to(torch.bfloat16)
    after = stored_tensors(model.spatial_blocks[0].mlp.fc1.weight)
    assert model.spatial_blocks[0].mlp.fc1.bias.dtype == torch.bfloat16
    assert after.keys() == before.keys() and {".qdata", ".scale"} <= after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert after[".scale"].dtype == torch.float32


def test_the_planner_counts_a_byte_for_a_weight() -> None:
    config = made().config
    plain = ModelSizes.of("STDiT3", config, Lora(rank=2))
    sizes = ModelSizes.of("STDiT3", config, Lora(rank=2, quantize="int8"))
    weights = [m.weight for m in made().modules() if isinstance(m, nn.Linear)]
    blocks = 4 * (24 * (72 + 24) + 24 * (24 + 48 + 24) + 2 * 24 * 48)
    rows = 4 * (72 + 24 + 24 + 48 + 24 + 48 + 24)
    assert sizes.int8 == blocks < sum(weight.numel() for weight in weights)
    # A scale of four bytes for each row, and torchao's zero point of one byte.
    assert sizes.int8_bytes == blocks + 5 * rows and sizes.total == plain.total
    zero = Zero(world=1, stage=2, element_size=2)
    states = [Persistent.training(each, zero, saves_frozen=False) for each in (plain, sizes)]
    assert states[0].weights - states[1].weights == 2 * blocks - sizes.int8_bytes
    assert states[0].master_weights == states[1].master_weights == FP32 * sum(sizes.trainable)


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="got lora.quantize.*expected.*opensora-sp\\[quantized"):
        quantize_blocks(made())
