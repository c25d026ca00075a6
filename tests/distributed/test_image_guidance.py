"""Conditioning frames of Open-Sora 1.3 with sequence parallelism: as in one process, in float64.

Sampling with guidance by text and frames, which triples the batch; losses and all gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cases import make_inputs, make_model
from ranks import run_ranks
from window_cases import WindowCase

from opensora_sp.diffusion import RectifiedFlow, rank_loss
from opensora_sp.diffusion.guidance import ConditioningFrames
from opensora_sp.diffusion.process import Noised
from opensora_sp.parallel import SequenceMesh, parallelize

pytestmark = pytest.mark.core
# 3 clips and 4 x 5 patches on 2 ranks: neither clips nor windows divide.
CASE = WindowCase((1, 5, 7, 9), kernel=(2, 3), cond=True)
TRAINED = WindowCase((2, 5, 7, 9), kernel=(2, 3), cond=True)
FLOW = RectifiedFlow(
    num_sampling_steps=4,
    cfg_scale=3.0,
    image_cfg_scale=2.0,
    force_num=1,
    use_oscillation_guidance=True,
    scale_image_weight=True,
    use_sdedit=True,
)
CONDITION = ("cond", "cond_mask", "y_null", "mask_index")


def sampled(mesh: SequenceMesh | None) -> torch.Tensor:
    """Latents of one clip."""
    model, inputs = make_model(CASE), make_inputs(CASE)
    if mesh is not None:
        parallelize(model, mesh)
    z, null = inputs.pop("x").detach(), inputs["y_null"]
    inputs = {k: v for k, v in inputs.items() if k not in (*CONDITION, "timestep")}

    tripled: dict[str, Any] = {k: torch.cat([v.detach()] * 3) for k, v in inputs.items()}
    tripled["y"] = torch.cat([inputs["y"].detach(), null, null])
    given = ConditioningFrames(torch.sin(3 * z), [0, 4])
    guide = FLOW.guide(
        model, **tripled, **given.guided_inputs(), y_null=torch.cat([torch.cos(null)] * 3)
    )
    noise = [torch.cos(z * (i + 1)) for i in range(FLOW.num_sampling_steps)]
    with torch.no_grad():
        return FLOW.sample(guide, z, conditioning_frames=given, draw_noise=noise.__getitem__)


def trained(
    mesh: SequenceMesh | None, index: tuple[int, ...] = (0, 4)
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Each sample's loss, and gradients averaged over the ranks; the null caption by default."""
    flow = RectifiedFlow(x_cond_weight=0.25)
    model, inputs = make_model(TRAINED), make_inputs(TRAINED)
    x = inputs["x"].detach()
    noised = Noised.of(
        flow, x, torch.cos(7 * x), torch.tensor([200.0, 700.0]).double(), None, index
    )
    inputs = {k: v for k, v in inputs.items() if k not in CONDITION}
    inputs |= ConditioningFrames(x, index).inputs() | dict(x=noised.x_t, timestep=noised.t)
    if mesh is None:
        losses = flow.losses(model(**inputs), noised)
        losses.mean().backward()
    else:
        # Frames that no rank needs may be NaN outside of the conditioning frames.
        shard = parallelize(model, mesh)(**inputs, output="shards")
        losses = flow.losses(shard, noised)
        rank_loss(losses, global_samples=len(losses), world_size=mesh.sp_size).backward()

    losses, gradients = losses.detach(), {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            gradients[name] = parameter.grad
    if mesh is not None:
        dist.all_reduce(losses)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= mesh.sp_size
    return losses, gradients


def trained_without_frames() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return trained(SequenceMesh(sp_size=dist.get_world_size()), index=())


def on_ranks() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    return sampled(mesh), *trained(mesh)


@pytest.fixture(scope="module")
def one_process() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return sampled(None), *trained(None)


@pytest.mark.parametrize("world_size", [2, 3])
def test_as_in_one_process(world_size: int, one_process: tuple) -> None:
    wanted, wanted_losses, wanted_gradients = one_process
    assert wanted.isfinite().all() and all(g.isfinite().all() for g in wanted_gradients.values())
    for latents, losses, gradients in run_ranks(world_size, on_ranks):
        torch.testing.assert_close(latents, wanted, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(losses, wanted_losses, rtol=1e-10, atol=1e-12)
        assert wanted_gradients["x_embedder_cond.proj.weight"].abs().max() > 0
        assert_close_gradients(gradients, wanted_gradients)


def test_training_without_conditioning_frames_as_in_one_process() -> None:
    """Zeros in their place train the biases of both embedders, and not their weights."""
    wanted_losses, wanted = trained(None, index=())
    for name in ("x_embedder_cond", "x_embedder_cond_mask"):
        assert wanted[f"{name}.proj.bias"].abs().max() > 0
        assert not wanted[f"{name}.proj.weight"].any()
    for losses, gradients in run_ranks(3, trained_without_frames):
        torch.testing.assert_close(losses, wanted_losses, rtol=1e-10, atol=1e-12)
        assert_close_gradients(gradients, wanted)


def assert_close_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    for name, gradient in wanted.items():
        error = (found[name] - gradient).abs().max().item()
        assert error <= 1e-9 * gradient.abs().max().item() + 1e-12 * largest, name
