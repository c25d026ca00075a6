"""The rectified-flow scheduler and loss against the reference values of the public release."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from golden_schedulers import toy_network
from golden_values import close, close_gradient, load, under

from opensora_sp.diffusion import RectifiedFlow, velocity_loss
from opensora_sp.diffusion.process import Geometry, Noised

pytestmark = pytest.mark.core


def geometry_of(values: list[float] | None, batch: int) -> Geometry | None:
    return None if values is None else Geometry(*(torch.full((batch,), float(v)) for v in values))


def test_complete_sampling() -> None:
    about, tensors = load("schedulers", "rflow_sample")
    for case in about["cases"]:
        one = under(tensors, case["case"] + "/")
        flow = RectifiedFlow(**case["scheduler"], legacy_frame_count=True)
        z, draws = one["input/z"], one.get("input/noise_draws")
        text = torch.cat([one["input/y"], one["input/y_null"]]).flatten(1).mean(1)
        seen = []

        def network(x, t, x_mask, drop_caption):
            seen.append((x, t, x_mask))  # noqa: B023
            return toy_network(x, t, text, x_mask)  # noqa: B023

        out = flow.sample(
            flow.guide(network, drop_caption=torch.zeros(2 * len(z), dtype=torch.bool)),
            z,
            geometry=geometry_of(
                list(case["geometry"].values()) if case["geometry"] else None, len(z)
            ),
            frame_levels=one.get("input/mask"),
            draw_noise=None if draws is None else draws.__getitem__,
        )
        close(out, one["output"])
        close(torch.stack([x for x, _, _ in seen]), one["trace/x"])
        close(torch.stack([t for _, t, _ in seen]), one["trace/t"])
        if "trace/x_mask" in one:
            assert torch.equal(torch.stack([m for _, _, m in seen]), one["trace/x_mask"])


def test_sampling_timesteps() -> None:
    about, tensors = load("schedulers", "rflow_timesteps")
    for case in about["cases"]:
        flow = RectifiedFlow(
            num_sampling_steps=case["steps"],
            use_discrete_timesteps=case["discrete"],
            use_timestep_transform=case["geometry"] is not None,
            legacy_frame_count=True,
        )
        close(
            torch.cat(flow.sampling_timesteps(1, geometry_of(case["geometry"], 1))),
            tensors[case["case"]],
        )


def test_timestep_transform() -> None:
    _, tensors = load("schedulers", "rflow_timestep_transform")

    def transform(t: torch.Tensor, geometry: Geometry, scale: float = 1.0) -> torch.Tensor:
        flow = RectifiedFlow(
            use_timestep_transform=True, transform_scale=scale, legacy_frame_count=True
        )
        return flow.timesteps_from(t / 1000, geometry)

    for s, scale in enumerate((1.0, 2.0)):
        for g, geometry in enumerate(tensors["geometry"].tolist()):
            close(transform(tensors["t"], geometry_of(geometry, 8), scale), tensors["output"][s, g])
    batch = under(tensors, "batch/")
    given = Geometry(batch["height"], batch["width"], batch["num_frames"])
    close(transform(batch["t"], given), batch["output"])
    close(
        transform(tensors["degenerate/t"], geometry_of([512, 512, 9], 3)),
        tensors["degenerate/output"],
    )
    first = Geometry(
        torch.full((3,), 512.0), torch.full((3,), 512.0), torch.tensor([1.0, 51.0, 102.0])
    )
    close(transform(tensors["first_is_image/t"], first), tensors["first_is_image/output"])


def test_the_transform_by_latent_frames_works_below_17_frames_and_else_agrees() -> None:
    t = torch.tensor([0.1, 0.5, 0.9])

    def transform(legacy: bool, frames: float) -> torch.Tensor:
        flow = RectifiedFlow(use_timestep_transform=True, legacy_frame_count=legacy)
        return flow.timesteps_from(t, geometry_of([240, 426, frames], 3))

    assert torch.equal(transform(legacy=False, frames=15), transform(legacy=True, frames=51))
    short = transform(legacy=False, frames=4)
    assert (short > 0).all() and (short.diff() > 0).all()


def test_forward_process() -> None:
    _, tensors = load("schedulers", "rflow_add_noise")
    one = under(tensors, "input/")
    close(RectifiedFlow().add_noise(one["x_start"], one["noise"], one["t"]), tensors["output"])


def test_latents_of_16_bits_see_the_same_timesteps() -> None:
    """Rounded to bf16, 966.67 is 968, and the path's first step is no step at all."""
    flow, reported = RectifiedFlow(num_sampling_steps=30), []
    for dtype in (torch.float32, torch.bfloat16):
        z = torch.ones(1, 2, 1, 2, 2, dtype=dtype)
        seen = []
        assert flow.sample(lambda x, t, m, seen=seen: seen.append(t) or x, z).dtype == dtype
        reported.append(torch.stack(seen))
    assert torch.equal(*reported)
    x, noise = (
        torch.zeros(1, 2, 1, 2, 2, dtype=torch.bfloat16),
        torch.ones(1, 2, 1, 2, 2, dtype=torch.bfloat16),
    )
    near = flow.add_noise(x, noise, torch.tensor([1.0]))
    assert near.dtype == x.dtype and near.float().mean().item() == pytest.approx(1e-3, rel=0.01)


def test_training_loss_and_its_gradient() -> None:
    about, tensors = load("schedulers", "rflow_training_losses")
    for case in about["cases"]:
        one = under(tensors, case["case"] + "/")
        x, noise, t = one["input/x_start"].requires_grad_(), one["input/noise"], one["input/t"]
        mask = one.get("input/mask")
        flow = RectifiedFlow(**case["scheduler"])
        x_t = flow.noisy_input(x, noise, t, mask)

        close(x_t, one["network_x"])
        # This network does not get the mask.
        output = toy_network(x_t, t, one["input/y"].flatten(1).mean(1), None)
        loss = velocity_loss(output, flow.target(x, noise), mask)
        assert torch.equal(loss, flow.losses(output, Noised.of(flow, x, noise, t, mask)))

        if "input/weights" in one:
            loss = loss * one["input/weights"][t]
        close(loss, one["loss"])

        loss.sum().backward()
        close_gradient(x.grad, one["grad/x_start"], floor=1e-5)


def test_a_sample_without_a_frame_that_counts_gives_zero() -> None:
    output, target = torch.randn(2, 3, 2, 4, 4), torch.randn(2, 3, 2, 4, 4)
    loss = velocity_loss(output, target, torch.tensor([[True, False], [False, False]]))
    close(loss[0], (output - target)[0, :, 0].square().mean())
    assert loss[1] == 0


def test_training_timesteps() -> None:
    """Uniform, discrete, logit-normal: logit(t / N) at a quantile is loc + scale x the normal's."""
    u = torch.tensor([0.0, 0.02, 0.25, 0.5, 0.9, 0.999, 1.0])
    close(RectifiedFlow().timesteps_from(u), u * 1000)
    assert RectifiedFlow(use_discrete_timesteps=True).timesteps_from(u).tolist() == [
        0,
        20,
        250,
        500,
        900,
        999,
        999,
    ]

    for loc, scale in ((0.0, 1.0), (-0.5, 0.7)):
        flow = RectifiedFlow(sample_method="logit-normal", loc=loc, scale=scale)
        t = flow.timesteps_from(u)
        assert t[0] == 0 and t[-1] == 1000  # the ends of the path, which are never drawn inside it
        for quantile, ours in zip(u[1:-1].tolist(), t[1:-1].tolist()):
            assert ours == pytest.approx(
                1000 / (1 + math.exp(-loc - scale * NormalDist().inv_cdf(quantile))), rel=1e-4
            )

    # The transform follows: a clip of 4 latent frames moves to the noise.
    geometry = geometry_of([512, 512, 4], 7)
    moved = RectifiedFlow(sample_method="logit-normal", use_timestep_transform=True).timesteps_from(
        u, geometry
    )
    plain = RectifiedFlow(sample_method="logit-normal").timesteps_from(u) / 1000
    close(moved, 2 * plain / (1 + plain) * 1000)


def test_levels_of_frames_need_noise() -> None:
    with pytest.raises(ValueError, match="got frame_levels without draw_noise"):
        RectifiedFlow().sample(
            lambda x, t, m: x, torch.zeros(1, 2, 1, 1, 1), frame_levels=torch.zeros(1, 1)
        )
