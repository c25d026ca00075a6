"""Whole models with all Triton kernels, interpreted, against plain torch."""

from __future__ import annotations

import pytest
import torch
from interpreter import run_interpreted
from random_weights import draw_weights

from opensora_sp.models import build_model, compile_blocks
from opensora_sp.models.kernels import Kernels, using_kernels
from opensora_sp.models.lora import add_lora
from opensora_sp.models.recompute import EVERYTHING, OFFLOADED

SIZE = (2, 4, 4)
COMMON = dict(hidden_size=144, depth=1, num_heads=2, caption_channels=8, model_max_length=6)
MODELS = {"STDiT": dict(input_size=SIZE), "STDiT2": dict(qk_norm=True), "STDiT3": {}}


def step(name: str, kernels: Kernels, *, compiled: bool) -> list[torch.Tensor]:
    """Output and all gradients, with conditioning frames, everything recomputed in backward."""
    torch.manual_seed(0)
    kind, *adapted = name.split(" with ")
    model = build_model(kind, **COMMON, **MODELS[kind])
    if adapted:
        # A fused kernel for some layers of a block, and not for others.
        add_lora(model, rank=2, alpha=3, targets=["*.qkv", "*.cross_attn.proj", "*.fc1"])
    draw_weights(model)
    model.set_grad_checkpoint(True)
    if compiled:
        compile_blocks(model, backend="aot_eager")

    x = torch.randn(2, 4, *SIZE, requires_grad=True)
    x_mask = torch.tensor([[False, True], [True, True]])
    numbers = {number: torch.full((2,), 24.0) for number in model.sample_inputs}
    with using_kernels(kernels):
        timestep, y = torch.tensor([300.0, 700.0]), torch.randn(2, 1, 6, 8)
        out = model(x, timestep, y, x_mask=x_mask, **numbers)
        out.square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [out.detach(), x.grad, *gradients]


def largest_difference(name: str, compiled: bool) -> float:
    wanted = step(name, "torch", compiled=False)
    ours = step(name, "triton", compiled=compiled)
    scale = max(float(z.abs().max()) for z in wanted[1:])
    differences = [(a - b).abs().max() for a, b in zip(wanted, ours, strict=True)]
    return max(map(float, differences)) / scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("STDiT2", False),
        ("STDiT3", True),
        ("STDiT3 with LoRA", False),
    ],
)
def test_values_and_gradients(name: str, compiled: bool) -> None:
    difference = run_interpreted(largest_difference, name, compiled)
    assert 0 < difference < 1e-5, difference


def gradients_of_one_clip(name: str, level: int) -> list[torch.Tensor]:
    """With kernels; of a single clip, whose tokens need not be copied between layouts."""
    torch.manual_seed(0)
    options = {**COMMON, **MODELS[name]}
    model = draw_weights(build_model(name, **options)).bfloat16()
    for block in model.modules():
        if hasattr(block, "checkpoint_level"):
            block.checkpoint_level = level

    x = torch.randn(1, 4, *SIZE).bfloat16()
    numbers = {number: torch.full((1,), 24.0) for number in model.sample_inputs}
    with using_kernels("triton"):
        out = model(x, torch.tensor([300.0]), torch.randn(1, 1, 6, 8).bfloat16(), **numbers)
        out.square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def are_equal_when_offloaded(name: str) -> bool:
    kept, offloaded = (gradients_of_one_clip(name, level) for level in (EVERYTHING, OFFLOADED))
    return all(map(torch.equal, kept, offloaded))


@pytest.mark.slow
def test_gradients_where_the_input_of_blocks_is_offloaded() -> None:
    """The block sees its input in another layout of memory when it is recomputed."""
    assert run_interpreted(are_equal_when_offloaded, "STDiT2")
