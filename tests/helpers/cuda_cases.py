"""Small models and batches for the tests that run CUDA's code paths under the stub."""

from __future__ import annotations

from typing import Any

import torch
from cuda_stub import phase
from cuda_stub.build import CACHE

# Heads of width 72, as the released models have.
COMMON = dict(hidden_size=144, depth=2, num_heads=2, caption_channels=8, model_max_length=6)
SIZE = (8, 16, 16)  # latent frames, height, width
WINDOWS = dict(kernel_size=(4, 4, -1), use_spatial_rope=True)  # of Open-Sora 1.3

# Model class, its own options, which masks the batch has.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "STDiT": ("STDiT", dict(input_size=SIZE, space_scale=0.5), ()),
    "STDiT video_mask": ("STDiT", dict(input_size=SIZE, space_scale=0.5), ("video_mask",)),
    "STDiT2": ("STDiT2", dict(qk_norm=True), ()),
    "STDiT2 x_mask": ("STDiT2", dict(qk_norm=True), ("x_mask",)),
    "STDiT3": ("STDiT3", {}, ()),
    "STDiT3 x_mask": ("STDiT3", {}, ("x_mask",)),
    "STDiT3 video_mask": ("STDiT3", {}, ("video_mask",)),
    "STDiT3 text mask": ("STDiT3", {}, ("mask", "drop_caption")),
    "STDiT3 windows": ("STDiT3", WINDOWS, ()),
    "STDiT3 windows, all masks": ("STDiT3", WINDOWS, ("x_mask", "video_mask", "mask")),
    "STDiT3 full attention": ("STDiT3", dict(full_attention=True), ()),
}


def build(case: str, *, checkpoint: bool = False, **options: Any) -> Any:
    """The case's model in bf16 on the device."""
    from opensora_sp.models import build_model

    name, own, _ = CASES[case]
    model = build_model(name, **{**COMMON, **own, **options}).to("cuda", torch.bfloat16)
    model.set_grad_checkpoint(checkpoint)
    return model


def batch(
    case: str, model: Any, *, samples: int = 2, size: tuple[int, int, int] = SIZE
) -> dict[str, Any]:
    """Arguments of `forward`: masks of text and of clips on the host, all else on the device."""
    masks = CASES[case][2]
    frames, height, width = size
    inputs: dict[str, Any] = dict(
        x=torch.zeros(samples, 4, *size),
        timestep=torch.full((samples,), 500.0),
        y=torch.zeros(samples, 1, 6, 8),
        **{name: torch.full((samples,), 24.0) for name in model.sample_inputs},
    )
    if "x_mask" in masks:
        inputs["x_mask"] = torch.ones(samples, frames, dtype=torch.bool)
        inputs["x_mask"][:, 0] = False

    inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
    if "video_mask" in masks:
        inputs["video_mask"] = torch.zeros(samples, frames, height, width, dtype=torch.bool)
        inputs["video_mask"][:, :, : height - 4, : width - 4] = True
    if "mask" in masks:
        inputs["mask"] = (torch.arange(6) < torch.tensor([[4], [6]])[:samples]).long()
    if "drop_caption" in masks:
        inputs["drop_caption"] = torch.arange(samples) == samples - 1
    return inputs


def cache() -> dict[str, str]:
    """Kernels of Triton are kept next to the stub: cold, a model takes a minute."""
    return {"TRITON_CACHE_DIR": str(CACHE.parent / "cuda_compiled" / "triton")}


def step(model: Any, inputs: dict[str, Any], name: str, **options: Any) -> None:
    """Forward and backward in phases of these names, after ``name``."""
    phase(f"{name}forward")
    out = model(**inputs, **options)
    loss = getattr(out, "tensor", out).float().square().mean()
    phase(f"{name}backward")
    loss.backward()
    del out, loss
    model.zero_grad(set_to_none=True)
    phase(f"{name}end")


def on_model(case: str, checkpoint: bool) -> None:
    model = build(case, checkpoint=checkpoint)
    inputs = batch(case, model)
    step(model, inputs, "warm-up ")
    step(model, inputs, "")
