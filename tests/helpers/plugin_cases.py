"""A small model with its batches, and the steps of one process that the plugin reproduces."""

from __future__ import annotations

import torch
from random_weights import draw_weights
from tiny_models import TINY

from opensora_sp.diffusion import velocity_loss
from opensora_sp.models import build_model

# Samples that no group of ranks divides: whole ones on each rank would leave nothing to exchange.
GLOBAL_BATCH, STEPS = 7, 2


def make_model() -> torch.nn.Module:
    return draw_weights(build_model("STDiT3", **TINY, pred_sigma=False))


def make_batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return dict(
        x=torch.randn(GLOBAL_BATCH, 2, 5, 6, 6, generator=generator),
        timestep=torch.rand(GLOBAL_BATCH, generator=generator) * 1000,
        y=torch.randn(GLOBAL_BATCH, 1, 6, 5, generator=generator),
        mask=(torch.arange(6) < torch.tensor([1, 2, 3, 4, 5, 6, 3])[:, None]).long(),
    )


def one_process() -> tuple[dict[str, torch.Tensor], list[float]]:
    """SGD with momentum, whose update shows a wrong gradient scale."""
    model, norms = make_model(), []
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9
    )
    for step in range(STEPS):
        batch = make_batch(step)
        velocity_loss(model(**batch), -batch["x"]).mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms
