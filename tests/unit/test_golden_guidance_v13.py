"""Sampling, training losses, frames and prompts of Open-Sora 1.3 against the public release."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import golden_values
import numpy as np
import pytest
import torch
from golden_values import GOLDEN, close, close_gradient, under
from parity_cases import make_inputs, make_model
from window_cases import WindowCase

from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.diffusion.conditioning_frames import (
    check_mask_types,
    conditioning_frames,
    draw_condition,
)
from opensora_sp.diffusion.guidance import ConditioningFrames, fix_flaws
from opensora_sp.diffusion.loss import frame_weights
from opensora_sp.diffusion.process import Geometry, Noised
from opensora_sp.features.batch import conditioning_inputs
from opensora_sp.models import STDiT3, STDiT3Config
from opensora_sp.sampling.prompts import prompt_of_loop, with_scores
from opensora_sp.sampling.reference_frames import frames_of_kind

pytestmark = pytest.mark.core
load = partial(golden_values.load, "v13")
SAMPLING = ("image_cfg_scale", "use_sdedit")
OSCILLATION = ("use_oscillation_guidance_for_text", "use_oscillation_guidance_for_image")


def tables(name: str) -> Any:
    return json.loads((GOLDEN / "v13" / f"{name}.json").read_text())


def toy(x, t, y, coefficients, *, x_mask=None, cond=None, cond_mask=None, y_null=None):
    """The network of the reference values; its formula is in the sidecars."""
    c, zero = SimpleNamespace(**coefficients), torch.zeros(())
    u = t.float().view(-1, 1, 1, 1, 1) / 1000
    s = y.float().flatten(1).mean(1).view(-1, 1, 1, 1, 1)
    k, r = (zero if z is None else z for z in (cond, cond_mask))
    m = zero if x_mask is None else x_mask.float()[:, None, :, None, None]
    q = zero if y_null is None else y_null.float().mean()
    first = torch.tanh(c.a * x + c.b * u + c.c * s + c.g * k) + c.d * m + c.h * r + c.p * q
    return torch.cat([first, torch.tanh(c.e * x - c.f * u)], dim=1)


def flow_of(case: dict) -> RectifiedFlow:
    options = {name: case[name] for name in (*SAMPLING, *OSCILLATION) if case.get(name) is not None}
    if case.get("guidance_scale_argument") is not None:
        options["cfg_scale"] = case["guidance_scale_argument"]
    return RectifiedFlow(**(case["scheduler"] | options), legacy_frame_count="v1.3")


def geometry_of(case: dict, batch: int) -> Geometry | None:
    if case["geometry"] is None:
        return None
    names = ("height", "width", "num_frames")
    return Geometry(*(torch.full((batch,), float(case["geometry"][name])) for name in names))


def sampled(flow: RectifiedFlow, case: dict, one: dict, network: Any, **inputs: Any):
    """The sample of a case, and what the network has seen of x and t."""
    z, draws = one["input/z"], one.get("input/noise_draws")
    seen: list[Any] = []
    given = None
    if case["mask_index"]:
        given = ConditioningFrames(one["input/z_cond"], case["mask_index"])
        assert torch.equal(given.mask, one["input/z_cond_mask"])
        inputs |= given.guided_inputs()

    def recorded(x, t, x_mask, **more):
        seen.append((x, t, x_mask))
        return network(x, t, x_mask=x_mask, **more)

    out = flow.sample(
        flow.guide(recorded, **inputs),
        z,
        geometry=geometry_of(case, len(z)),
        frame_levels=one.get("input/mask"),
        conditioning_frames=given,
        draw_noise=None if draws is None else draws.__getitem__,
    )
    return out, seen


def names_of(name: str) -> list[str]:
    return [case["case"] for case in load(name)[0]["cases"]]


@pytest.mark.parametrize("name", names_of("rflow_sample"))
def test_complete_sampling(name: str) -> None:
    about, tensors = load("rflow_sample")
    (case,) = (one for one in about["cases"] if one["case"] == name)
    one, flow = under(tensors, f"{name}/"), flow_of(case)
    empty = one["input/y_neg"] if case["negative_prompt"] else one["input/y_null"]
    copies = 3 if case["mask_index"] else 2
    y = torch.cat([one["input/y"]] + [empty] * (copies - 1))
    coefficients = about["toy_network"]["coefficients"]

    def network(x, t, *, mask_index=None, **inputs):
        return toy(x, t, y, coefficients, **inputs)

    more = {"y_null": one["input/y_null"]} if case["mask_index"] else {}
    out, seen = sampled(flow, case, one, network, **more)
    close(out, one["output"])
    close(torch.stack([x for x, _, _ in seen]), one["trace/x"])
    close(torch.stack([t for _, t, _ in seen]), one["trace/t"])
    for step, scale in enumerate(case["text_scale_per_step"]):
        assert flow.text_scale(step) == scale
    for step, of_frames in enumerate(case["image_scale_per_step_and_frame"] or ()):
        assert flow.image_scales(step, len(of_frames)) == pytest.approx(of_frames)


@pytest.mark.parametrize("name", names_of("rflow_sample_stdit3"))
def test_complete_sampling_with_a_model(name: str) -> None:
    about, tensors = load("rflow_sample_stdit3")
    (case,) = (one for one in about["cases"] if one["case"] == name)
    one, flow = under(tensors, f"{name}/"), flow_of(case)
    model = STDiT3(STDiT3Config(**about["constructor"], use_cond=True)).eval()
    model.load_state_dict({k: v.float() for k, v in under(tensors, "state/").items()})

    copies = 3 if case["mask_index"] else 2
    empty, mask = one["input/y_null"], one["input/y_mask"]
    masks = [mask] * copies
    if case["negative_prompt"]:
        empty, masks = one["input/y_neg"], [mask, one["input/y_neg_mask"]]
    y, mask = torch.cat([one["input/y"]] + [empty] * (copies - 1)), torch.cat(masks)
    sizes = {k: torch.full((len(y),), case["geometry"][k]) for k in ("height", "width", "fps")}
    more = {"y_null": torch.cat([one["input/y_null"]] * copies)} if case["mask_index"] else {}
    with torch.no_grad():
        out, seen = sampled(flow, case, one, model, y=y, mask=mask, **sizes, **more)
    close(out, one["output"])
    assert len(seen) == flow.num_sampling_steps


def test_oscillation_and_flaw_fix() -> None:
    about, tensors = load("rflow_rules")
    for case in about["oscillation"]:
        flow = RectifiedFlow(
            cfg_scale=case["guidance_scale"],
            use_oscillation_guidance=True,
            force_num=case["force_num"],
        )
        assert [flow.text_scale(step) for step in range(16)] == case["per_step"]
    for name in ("flaw_fix0", "flaw_fix1"):
        one = under(tensors, f"{name}/")
        close(fix_flaws(one["input/guided"], one["input/prompt_prediction"]), one["output"])


def test_timestep_transform() -> None:
    about, tensors = load("rflow_rules")
    for case in about["timestep_transform"]:
        if "scale_temporal" in case:  # an argument that nothing sets
            continue
        one = under(tensors, f"{case['case']}/")
        flow = RectifiedFlow(
            use_timestep_transform=True,
            transform_scale=case.get("scale", 1.0),
            legacy_frame_count="v1.3",
        )
        geometry = geometry_of({"geometry": case}, len(one["input/t"]))
        ours, theirs = flow.timesteps_from(one["input/t"] / 1000, geometry), one["output"]
        close(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))
    mixed, one = about["mixed_batch"], under(tensors, "mixed_batch/")
    flow = RectifiedFlow(
        use_timestep_transform=True, transform_scale=mixed["scale"], legacy_frame_count="v1.3"
    )
    height, width = (torch.tensor(mixed[name]).float() for name in ("height", "width"))
    given = Geometry(height, width, one["input/num_frames"])
    close(flow.timesteps_from(one["input/t"] / 1000, given), one["output"])


LOSSES = [name for name in names_of("rflow_training_losses") if name.startswith("condition_")]


@pytest.mark.parametrize("name", ["plain", "frame_mask", "sampled_time_transform", *LOSSES])
def test_training_losses(name: str) -> None:
    about, tensors = load("rflow_training_losses")
    (case,) = (one for one in about["cases"] if one["case"] == name)
    one = under(tensors, f"{name}/")
    flow = RectifiedFlow(**case["scheduler"], legacy_frame_count="v1.3")
    x_start, noise = one["input/x_start"].requires_grad_(), one["input/noise"]
    if "input/t" in one:
        t = one["input/t"]
    else:
        t = flow.timesteps_from(one["input/uniform_draw"], geometry_of(case, len(noise)))
    close(t, one["trace/t"])

    index, x_mask = case["mask_index"] or (), one.get("input/mask")
    noised = Noised.of(flow, x_start, noise, t, x_mask, index)
    close(noised.x_t, one["trace/x"])
    if "input/x_gt" in one:
        noised = Noised(
            x_t=noised.x_t,
            target=flow.target(one["input/x_gt"], noise),
            x_start=x_start,
            t=t,
            x_mask=x_mask,
            conditioning_frames=index,
        )
    inputs: dict[str, Any] = {}
    if index:
        latents = one.get("input/x_noisy_ref", x_start)
        given = ConditioningFrames(latents, index).inputs()
        drawn = case["condition_drawn"]
        cond = torch.zeros_like(x_start) if drawn in ("text", "null") else given["cond"]
        close(cond, one["trace/cond"])
        close(given["cond_mask"], one["trace/cond_mask"])
        inputs = dict(cond=cond, cond_mask=given["cond_mask"], y_null=one["trace/y_null"])
    # With a frame mask the release does not pass it to the network.
    coefficients = about["toy_network"]["coefficients"]
    prediction = toy(noised.x_t, t, one["trace/y"], coefficients, **inputs)
    losses = flow.losses(prediction, noised)
    close(losses, one["loss"])
    (gradient,) = torch.autograd.grad(losses.sum(), x_start)
    close_gradient(gradient, one["grad/x_start"], floor=1e-6)


def test_weights_of_conditioning_frames() -> None:
    assert frame_weights(5, range(4), 0.0).tolist() == [0, 0, 0, 0, 5]
    assert frame_weights(2, range(2), 0.5).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("frames", [1, 5], ids=["image", "none"])
def test_training_without_conditioning_frames_adds_the_biases_of_both_embedders(
    frames: int,
) -> None:
    """The release passes ``cond`` and ``cond_mask`` of zeros (notes of the golden losses)."""
    case = WindowCase((2, frames, 4, 6), kernel=(2, 3), cond=True)
    model, inputs = make_model(case), make_inputs(case)
    inputs = {k: v for k, v in inputs.items() if not k.startswith(("cond", "y_null", "mask_index"))}
    draws: Any = SimpleNamespace(
        condition=draw_condition({"none": 1}, None, frames, np.random.default_rng(0)),
        reference_noise=None,
    )
    # Of latents that no rank needs, nothing is read.
    latents = torch.full_like(inputs["x"], torch.nan)
    given = conditioning_inputs(latents, draws)
    assert given["mask_index"] == []
    assert not given["cond"].any() and not given["cond_mask"].any()

    biases = [model.x_embedder_cond.proj.bias, model.x_embedder_cond_mask.proj.bias]
    with torch.no_grad():
        found, without = model(**inputs, **given), model(**inputs)
        model.x_embedder.proj.bias += sum(biases)
        wanted = model(**inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    assert (found - without).abs().max() > 1e-4


def test_training_kinds() -> None:
    table = tables("training_mask_index")
    rng = np.random.default_rng(0)
    for kind, frames, index in table["rows"]:
        if isinstance(index, str):
            with pytest.raises(ValueError, match="mask_types"):
                check_mask_types({kind: 1.0})
        else:
            assert conditioning_frames(kind, frames, rng) == sorted(set(index)), (kind, frames)

    edges = {}
    for kind, frames, _, _, index in table["random_kinds"]["rows"]:
        if isinstance(index, str):
            assert frames < 3  # for which ``draw_condition`` has no frames
        else:
            edges.setdefault((kind, frames), set()).add(tuple(index))
    for (kind, frames), known in edges.items():
        found = {tuple(conditioning_frames(kind, frames, rng)) for _ in range(300)}
        assert known <= found and all(len(one) < frames for one in found)


def test_drawn_conditions_follow_the_weights() -> None:
    table, rng = tables("training_mask_index"), np.random.default_rng(0)
    kinds, drops = table["released_weights"], table["released_drop_condition"]
    found = [draw_condition(kinds, drops, 10, rng) for _ in range(4000)]
    shares = {
        "none": (sum(not one.index for one in found), 2 / 16),
        "head": (sum(one.index == (0,) for one in found), 5 / 16 + 1 / 16 / 2 / 8),
        "noisy": (sum(one.noise > 0 for one in found), 2 / 16),
        "drops_text": (sum(one.drops_text for one in found), 0.1),
        "drops_frames": (sum(one.drops_frames for one in found), 0.1),
        "both": (sum(one.drops_text and one.drops_frames for one in found), 0.05),
    }
    for name, (count, share) in shares.items():
        assert count / 4000 == pytest.approx(share, abs=0.025), name
    assert draw_condition(kinds, None, 1, rng).index == ()


def conditioning_cases() -> list[dict]:
    table = tables("conditioning")
    first = [case | {"loop": 0} for case in table["first_loop"] if case["kind"]]
    later = []
    for case in table["later_loops"]:
        loops = 2 if case["last_loop_flag"] else 3
        later.append(case | {"loop": 1, "loops": loops})
    known = [case for case in first + later if "mask_index" in case]
    # Clips with references of other lengths are sampled apart here.
    return [case for case in known if len(case["reference_lengths"]) == 1]


def test_conditioning_frames_of_loops() -> None:
    cases, frames = conditioning_cases(), tables("conditioning")["latent_frames"]
    assert len(cases) > 60
    for case in cases:
        (lengths,) = case["reference_lengths"]
        references = [
            (1000.0 * (j + 1) + torch.arange(float(length))).view(1, -1, 1, 1)
            for j, length in enumerate(lengths)
        ]
        latent = torch.arange(float(frames)).view(1, -1, 1, 1)
        given = frames_of_kind(
            case["kind"],
            references,
            latent if case["loop"] else None,
            loop=case["loop"],
            loops=case["loops"],
            length=case["condition_frames"],
            latent=latent,
        )
        assert given.index == case["mask_index"], case
        assert given.latents.flatten().tolist() == case["reference"][0], case


def test_scores_in_words() -> None:
    table = tables("prompts")
    for prompt, aes, flow, camera, wanted in table["score_suffix"]["rows"]:
        cfg = SimpleNamespace(score_style="words", aes=aes, flow=flow, camera_motion=camera)
        assert with_scores(cfg, prompt) == wanted  # type: ignore[arg-type]


def test_prompts_of_loops() -> None:
    table = tables("prompts")
    for row in table["whole_chain"]["rows"]:
        cfg = SimpleNamespace(
            score_style="words",
            aes=row["aesthetic"],
            flow=row["motion"],
            camera_motion=row["camera"],
        )
        prompt = with_scores(cfg, row["prompt"])  # type: ignore[arg-type]
        found = [prompt_of_loop(prompt, loop).lower() for loop in range(len(row["per_loop"]))]
        assert found == row["per_loop"]
