"""The predictions of a sampling step: which texts guide it, and numbers that are not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from random_weights import draw_weights
from runs import SAMPLE

from opensora_sp.config import load_inference_config
from opensora_sp.config.components import build_component
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS
from opensora_sp.sampling.pipeline import Pipeline, PlacedReferences
from opensora_sp.sampling.reference_frames import Insertion, insert_references
from opensora_sp.sampling.requests import requests_of

PROMPTS = ["a red circle", "a green square"]


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    (tmp_path / "sample.py").write_text(SAMPLE)
    cfg = load_inference_config(tmp_path / "sample.py")
    vae = build_component(cfg.vae, LATENT_ENCODERS)
    text = build_component(cfg.text_encoder, TEXT_ENCODERS)
    model = draw_weights(cfg.model_spec.build()).requires_grad_(False).eval()
    return Pipeline(cfg, model, vae, text, torch.device("cpu"))


def test_a_prompt_is_guided_away_from_its_negative_prompt_or_from_no_caption(
    pipeline: Pipeline,
) -> None:
    requests = [
        replace(request, negative_prompt=negative)
        for request, negative in zip(requests_of(pipeline.cfg, PROMPTS), (None, "blue"))
    ]
    size = pipeline.vae.latent_size(*requests[0].shape)
    x = torch.randn(2, pipeline.vae.channels, *size)
    time = torch.tensor([700.0, 300.0])
    numbers = {name: torch.tensor([24.0, 30.0]) for name in pipeline.model.sample_inputs}

    def alone(texts: list[str], drop: list[bool]) -> torch.Tensor:
        y, mask = pipeline.text_encoder.encode(texts)
        return pipeline.model(x, time, y, mask=mask, drop_caption=torch.tensor(drop), **numbers)

    twice = {name: torch.cat([value] * 2) for name, value in numbers.items()}
    both = pipeline.model(
        torch.cat([x] * 2), torch.cat([time] * 2), y=pipeline.encode(requests), **twice
    )
    conditional, other = both.chunk(2)
    torch.testing.assert_close(conditional, alone(PROMPTS, [False, False]))
    torch.testing.assert_close(other, alone([PROMPTS[0], "blue"], [True, False]))
    # No two of these texts give the same prediction.
    assert not torch.allclose(conditional, other)
    assert not torch.allclose(other[1:], alone(PROMPTS, [True, True])[1:])


def test_latents_that_are_not_finite_are_refused(pipeline: Pipeline) -> None:
    requests = requests_of(pipeline.cfg, PROMPTS[:1])
    assert pipeline.latents(requests).isfinite().all()
    for number in ("nan", "inf"):
        pipeline.model.final_layer.linear.bias.fill_(float(number))
        with pytest.raises(ValueError, match=f"got latents that are not finite for .*{PROMPTS[0]}"):
            pipeline.latents(requests)


def test_a_loop_that_is_guided_by_frames_as_well_has_text_for_these_predictions(
    pipeline: Pipeline,
) -> None:
    """The prompt is that of the loop before, which had no conditioning frames."""
    pipeline.cfg = pipeline.cfg.model_copy(
        update=dict(loop=2, cond_type="i2v_tail", condition_frame_length=1)
    )
    requests = requests_of(pipeline.cfg, PROMPTS[:1])
    size = (pipeline.vae.channels, *pipeline.vae.latent_size(*requests[0].shape))
    references = PlacedReferences([torch.randn(size)], [])
    with (
        mock.patch.object(pipeline, "conditioning", return_value=references),
        mock.patch.object(pipeline, "latents", return_value=torch.zeros(1, *size)) as sampled,
    ):
        pipeline.looped(requests)
    texts = [call.kwargs["text"] for call in sampled.call_args_list]
    assert [len(text.lengths) for text in texts] == [2, 3]


def test_a_prompt_s_own_references_replace_those_of_the_loop_before() -> None:
    own, last = torch.ones(1, 1, 2, 2), torch.full((1, 3, 2, 2), 2.0)
    placed = PlacedReferences([own], [Insertion(loop=1)])
    placed = placed.with_reference(last, Insertion(1, reference_start=-2, length=2))
    latent, _ = insert_references(
        torch.zeros(1, 4, 2, 2), placed.references, placed.insertions, loop=1, align=None
    )
    assert latent[0, :, 0, 0].tolist() == [1.0, 2.0, 0.0, 0.0]
