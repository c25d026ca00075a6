"""Mask strategies and looped prompts against the released behaviour, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from opensora_sp.sampling.prompts import prompt_of_loop
from opensora_sp.sampling.reference_frames import (
    insert_references,
    nearest_point,
    parse_mask_strategy,
)

pytestmark = pytest.mark.core
GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden/data/inference_conditioning_v12.json").read_text()
)


@pytest.mark.parametrize(
    "case", GOLDEN["apply_mask_strategy"], ids=lambda case: repr(case["strategy"])
)
def test_frames_are_put_where_the_release_puts_them(case: dict) -> None:
    insertions = parse_mask_strategy(case["strategy"])
    assert [list(vars(insertion).values()) for insertion in insertions] == case["parsed"]
    latent = torch.arange(case["latent_frames"]).view(1, -1, 1, 1).float()
    references = [
        (1000 * (j + 1) + torch.arange(length)).view(1, -1, 1, 1).float()
        for j, length in enumerate(case["reference_lengths"])
    ]
    found, mask = insert_references(
        latent, references, insertions, loop=case["loop"], align=case["align"]
    )
    assert found.flatten().tolist() == case["latent_after"]
    assert mask.tolist() == pytest.approx(case["mask"])
    assert torch.equal(latent.flatten(), torch.arange(case["latent_frames"]).float())  # not changed


def test_alignment_and_prompts_of_loops() -> None:
    for value, grid, maximum, result in GOLDEN["nearest_point"]["rows"]:
        assert nearest_point(value, grid, maximum) == result
    for prompt, loop, result in GOLDEN["looped_prompts"]["rows"]:
        assert prompt_of_loop(prompt, loop) == result


@pytest.mark.parametrize(
    "text", ["a", "0,0,0,0,0", "0,0,0,0,1,1.5", "-1", "0,-1", "0,0,0,0,1,0,0", "0,0.5", "0,,0"]
)
def test_impossible_strategies_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected up to six numbers.*write for example '0,0,0,0"):
        parse_mask_strategy(f"0;{text}")


def test_frames_and_references_that_do_not_exist_are_refused() -> None:
    latent, reference = torch.zeros(1, 4, 1, 1), torch.ones(1, 2, 1, 1)
    for text, reported in [
        ("0,1", "got mask strategy 0,1,0,0,1,0.0 with 1 references"),
        ("0,0,2", "for a reference of 2 latent frames; expected a first frame from -2 to 1"),
        ("0,0,0,-5", "for a video of 4 latent frames; expected a first frame from -4 to 3"),
    ]:
        with pytest.raises(ValueError) as error:
            insert_references(latent, [reference], parse_mask_strategy(text), loop=0, align=None)
        assert reported in str(error.value)
    for prompt in ("|1|a dog", "|a cat", "|0|a cat|x|a dog", "|0|a cat|1"):
        with pytest.raises(ValueError, match="numbers and texts in turn"):
            prompt_of_loop(prompt, 0)
