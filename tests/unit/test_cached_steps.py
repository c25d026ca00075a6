"""Cached sampling steps and guidance intervals: which steps, what they reuse, refused mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fit_cache_curve import fitted_curve
from golden_models import built
from golden_values import load, under
from runs import CURVE
from torch import Tensor

from opensora_sp.config import InferenceConfig, load_inference_config
from opensora_sp.diffusion import IDDPM, RectifiedFlow
from opensora_sp.diffusion.cached_steps import (
    CachedPrediction,
    computed_steps,
    path_length,
    sampling_steps,
)
from opensora_sp.models.block_cache import BlockCache
from opensora_sp.parallel import SequenceMesh
from opensora_sp.planner.run_plan import plan
from opensora_sp.sampling.outputs import facts_of
from opensora_sp.sampling.pipeline import Pipeline
from opensora_sp.sampling.requests import requests_of
from opensora_sp.sampling.run import build_pipeline

PROMPTS = ["a red circle", "a green square"]
# Of six steps, 1/6 of the noise apart: with the curve of the tests, every third is computed.
EVERY_THIRD = [True, False, False, True, False, True]
CACHED = {"scheduler.cache_threshold": 0.4, "scheduler.cache_curve": CURVE}


def config(folder: Path, **values: Any) -> InferenceConfig:
    steps = {"scheduler.num_sampling_steps": 6, "precision": "fp64"}
    return load_inference_config(folder / "sample.py", values=steps | values)


def pipeline_of(folder: Path, cfg: InferenceConfig) -> Pipeline:
    return build_pipeline(cfg, folder, SequenceMesh(1), torch.device("cpu"))


def test_computed_steps() -> None:
    """The sum starts anew after a computed step, the ends and a change of guidance are computed."""
    levels = [1 - i / 10 for i in range(10)]
    guided = [True] * 10

    def numbers(threshold: float, guided: list[bool] = guided, curve: Any = CURVE) -> list[int]:
        computed = computed_steps(levels, guided, curve, threshold)
        return [i for i, is_computed in enumerate(computed) if is_computed]

    assert numbers(0) == list(range(10)) == numbers(0.09)
    assert numbers(0.25) == [0, 3, 6, 9]
    assert numbers(0.35) == [0, 4, 8, 9]
    assert numbers(9.0) == [0, 9]
    # A polynomial that falls beyond 0.05, at a distance of 0.1.
    assert numbers(0.02, curve=CURVE | {"polynomial": [-10.0, 1.0, 0.0]}) == list(range(10))
    assert numbers(0.25, [True] * 4 + [False] * 6) == [0, 3, 4, 7, 9]
    # The embedding changes twice as fast in the first half of the path, and more than linearly.
    bent = CURVE | {"path": [0.0, 1.0, 3.0], "polynomial": [1.0, 0.0, 0.0]}
    assert [path_length(bent["path"], level) for level in (0, 0.25, 0.75, 1)] == [0, 0.5, 2, 3]
    assert numbers(0.3, curve=bent) == [0, 2, 4, 9]


@pytest.mark.parametrize("process", [RectifiedFlow, IDDPM])
def test_steps_of_a_process(process: Any) -> None:
    flow = process(num_sampling_steps=5, guidance_interval=(0.3, 0.85))
    steps = sampling_steps(flow, (1, 64, 64), 1)
    levels = [step.level for step in steps]
    assert levels == sorted(levels, reverse=True) and levels[-1] >= 0 and levels[0] <= 1
    assert [step.guided for step in steps] == [0.3 <= level <= 0.85 for level in levels]
    assert 0 < sum(step.guided for step in steps) < 5 and all(step.computed for step in steps)


def test_every_step_is_guided_by_default() -> None:
    """Also where the transform of timesteps rounds the first one up."""
    for side in range(16, 512, 16):
        flow = RectifiedFlow(num_sampling_steps=2, use_timestep_transform=True)
        steps = sampling_steps(flow, (7, side, 3 * side), 5)
        assert all(step.guided for step in steps)


@pytest.mark.parametrize(
    "name", ["stdit_v12_framemask", "stdit2_v12_framemask", "stdit3_v12_framemask"]
)
def test_a_model_reuses_the_residual_of_its_blocks(name: str) -> None:
    about, tensors = load("models", name)
    model = built(about, tensors).double().eval()
    inputs = {
        name: z.double() if z.is_floating_point() else z
        for name, z in under(tensors, "input/").items()
    }
    runs: list[int] = []
    for block in model.transformer_blocks:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    cache = BlockCache()

    with torch.no_grad():
        wanted = model(**inputs)
        cache.keeps = True
        assert torch.equal(model(**inputs, block_cache=cache), wanted)

        # The same input makes the same output; another one is not ignored.
        cache.keeps, cache.reuses, kept = False, True, cache.residual
        torch.testing.assert_close(model(**inputs, block_cache=cache), wanted)
        runs.clear()
        inputs["timestep"] = inputs["timestep"] / 2
        reused = model(**inputs, block_cache=cache)
        assert not runs and cache.residual is kept
        assert not torch.allclose(reused, wanted)
        inputs["x"] = inputs["x"] + 0.1
        assert not torch.allclose(model(**inputs, block_cache=cache), reused)


def recorded_sizes(pipeline: Pipeline, calls: list[tuple[int, bool]]) -> None:
    """Record of each call its batch, and whether it reuses the residual."""

    def record(module: Any, args: Any, kwargs: Any) -> None:
        cache = kwargs.get("block_cache")
        calls.append((len(args[0]), cache is not None and cache.reuses))

    pipeline.model.register_forward_pre_hook(record, with_kwargs=True)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_cached_steps_of_the_pipeline(
    trained: Path, scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    """By hand: reused steps add the residual of the last computed one, each sample its own."""
    caplog.set_level("INFO")
    values = CACHED | {"scheduler.cfg_scale": scale}
    pipeline, calls = pipeline_of(trained, config(trained, **values)), list[tuple[int, bool]]()
    recorded_sizes(pipeline, calls)
    requests = requests_of(pipeline.cfg, PROMPTS)
    cached = pipeline.latents(requests)
    copies = 1 if scale == 1 else 2
    assert calls == [(2 * copies, not computed) for computed in EVERY_THIRD]
    assert "3 of 6 steps are computed (0, 3, 5)" in caplog.text

    # Each sample alone has the same latents: no residual is another sample's.
    for i, request in enumerate(requests):
        torch.testing.assert_close(pipeline.latents([request])[0], cached[i])
    exact = pipeline_of(trained, config(trained, **{"scheduler.cfg_scale": scale}))
    difference = (exact.latents(requests) - cached).abs().max()
    assert 0 < difference < exact.latents(requests).abs().max()


def test_with_all_steps_computed_and_guided_nothing_changes(trained: Path) -> None:
    requests = requests_of(config(trained), PROMPTS)
    wanted = pipeline_of(trained, config(trained)).latents(requests)
    everything = CACHED | {"scheduler.cache_threshold": 1e-9, "scheduler.guidance_interval": "0,1"}
    assert torch.equal(
        pipeline_of(trained, config(trained, **everything)).latents(requests), wanted
    )


def test_a_guidance_interval_makes_half_of_the_predictions_elsewhere(trained: Path) -> None:
    """As guidance of scale 1 in these steps."""
    cfg = config(trained, **{"scheduler.guidance_interval": (0.3, 0.7)})
    pipeline, calls = pipeline_of(trained, cfg), list[tuple[int, bool]]()
    recorded_sizes(pipeline, calls)
    requests = requests_of(cfg, PROMPTS)
    latents = pipeline.latents(requests)
    assert [size for size, _ in calls] == [2, 2, 4, 4, 4, 2]

    class Oscillating(RectifiedFlow):
        def text_scale(self, step: int) -> float:
            return self.cfg_scale if step in (2, 3, 4) else 1.0

    pipeline.process = Oscillating(num_sampling_steps=6, cfg_scale=4.0)
    torch.testing.assert_close(latents, pipeline.latents(requests))


def test_a_step_with_other_conditioning_frames_is_computed() -> None:
    cache, modes = BlockCache(), list[tuple[bool, bool]]()

    def predict(x: Tensor, t: Tensor, x_mask: Tensor | None) -> Tensor:
        modes.append((cache.keeps, cache.reuses))
        cache.residual = x
        return x

    prediction = CachedPrediction(predict, cache, EVERY_THIRD)
    given, free = torch.tensor([[False, True]]), torch.tensor([[True, True]])
    for mask in (given, free, free, free, free, free):
        prediction(torch.zeros(1), torch.zeros(1), mask)
    keeps, reuses, neither = (True, False), (False, True), (False, False)
    assert modes == [keeps, keeps, reuses, keeps, reuses, neither]
    assert cache.residual is None


def test_steps_are_in_metadata_and_plan(trained: Path) -> None:
    cfg = config(trained, **CACHED)
    narrow = config(trained, **CACHED, **{"scheduler.guidance_interval": (0.6, 1.0)})
    (request,) = requests_of(cfg, PROMPTS[:1])
    facts = facts_of(cfg, request)
    assert facts["computed_steps"] == [0, 3, 5] and "guided_steps" not in facts
    assert facts["config"]["scheduler"]["cache_curve"] == CURVE
    facts = facts_of(narrow, request)
    assert facts["guided_steps"] == [0, 1, 2] and facts["computed_steps"] == [0, 3, 5]
    assert not {"computed_steps", "guided_steps"} & facts_of(config(trained), request).keys()

    steps = {}
    for name, planned in (("all", config(trained)), ("cached", cfg), ("narrow", narrow)):
        (bucket,) = plan(planned, 3).buckets
        assert bucket.steps is not None
        steps[name] = bucket.steps
        if name == "all":
            assert steps[name].seconds == pytest.approx(6 * bucket.seconds)
    assert [step.computed for step in steps["cached"].steps] == EVERY_THIRD
    assert steps["cached"].seconds == pytest.approx(steps["all"].seconds / 2)
    assert steps["narrow"].seconds < steps["cached"].seconds


def other_model(curve: dict[str, Any]) -> dict[str, Any]:
    return curve | {"model": curve["model"] | {"depth": 28}}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "interval": ({"guidance_interval": "0.9,0.1"}, r"got guidance_interval \(0.9, 0.1\); expected"),
    "level": ({"guidance_interval": (0, 2)}, "expected a number less than or equal to 1"),
    "threshold": ({"cache_threshold": -1}, "expected a number greater than or equal to 0"),
    "no curve": ({"cache_threshold": 0.1}, "got cache_threshold 0.1 without a cache_curve"),
    "no file": ({"cache_curve": "none.json"}, "got cache_curve 'none.json', which is no file"),
    "numbers": ({"cache_curve": CURVE | {"path": ["a", 1]}}, "expected a valid number"),
    "falls": (
        {"cache_curve": CURVE | {"path": [1.0, 0.0]}, "cache_threshold": 0.1},
        "got a cache_curve whose path falls: .*; expected lengths up to rising",
    ),
    "unknown": (
        {"cache_curve": CURVE | {"more": 1}},
        "got scheduler.cache_curve = .*; expected another value",
    ),
    "model": (
        {"cache_curve": other_model(CURVE), "cache_threshold": 0.1},
        "got a cache_curve of the model .*'depth': 28.*; expected .*'depth': 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options(trained: Path, name: str) -> None:
    options, message = WRONG[name]
    values = {f"scheduler.{key}": option for key, option in options.items()}
    with pytest.raises(ValueError, match=message):
        config(trained, **values)


def test_a_curve_needs_more_steps_than_one() -> None:
    pipeline: Any = SimpleNamespace(process=RectifiedFlow(num_sampling_steps=1))
    with pytest.raises(ValueError, match="got num_sampling_steps 1 .*; expected at least 4; pass"):
        fitted_curve(pipeline, [])


def test_an_interval_without_a_step_is_refused_before_sampling(trained: Path) -> None:
    cfg = config(trained, **{"scheduler.guidance_interval": (0.9, 0.95)})
    with pytest.raises(ValueError, match="in which no step lies; expected some of the noise"):
        facts_of(cfg, requests_of(cfg, PROMPTS)[0])


def test_a_config_reads_a_curve_from_a_file_also_in_place_of_its_own(
    trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "curve.json").write_text(json.dumps(CURVE))
    cfg = config(trained, **{"scheduler.cache_curve": str(tmp_path / "curve.json")})
    assert cfg.scheduler["cache_curve"] == CURVE

    # In the place of the curve that a config has.
    derived = tmp_path / "derived.py"
    derived.write_text(
        f"_base_ = ['{trained / 'sample.py'}']\nscheduler = dict(cache_curve={CURVE})"
    )
    further = tmp_path / "further.py"
    lines = f"_base_ = ['derived.py']\nscheduler = dict(cache_curve='{tmp_path / 'curve.json'}')"
    further.write_text(lines)
    (tmp_path / "curve.json").write_text(json.dumps(CURVE | {"polynomial": [2.0, 0.0]}))
    path = {"scheduler.cache_curve": str(tmp_path / "curve.json")}
    for cfg in (load_inference_config(derived, values=path), load_inference_config(further)):
        assert cfg.scheduler["cache_curve"]["polynomial"] == [2.0, 0.0]


def test_without_guidance_an_interval_changes_nothing(trained: Path) -> None:
    values = {"scheduler.guidance_interval": (0.9, 0.95), "scheduler.cfg_scale": 1}
    cfg = config(trained, **values)
    assert "guided_steps" not in facts_of(cfg, requests_of(cfg, PROMPTS)[0])
