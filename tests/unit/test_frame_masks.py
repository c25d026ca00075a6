"""Frame masks of training: the reference's masks, short clips, names, ratios, draws of batches."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from golden_values import GOLDEN
from runs import batch_of, features_of

from opensora_sp.config import load_train_config
from opensora_sp.data.dataset import Clip
from opensora_sp.data.randomness import generator
from opensora_sp.diffusion.conditioning_frames import (
    STRATEGIES,
    check_mask_ratios,
    draw_frame_mask,
    frame_mask,
)
from opensora_sp.encoders.standins import HashedBagOfWords, PatchPoolVAE
from opensora_sp.features.sources import Encoders

pytestmark = pytest.mark.core
REFERENCE = json.loads((GOLDEN / "data" / "training_masks_v12.json").read_text())
DEMO = Path(__file__).parents[2] / "configs" / "demo" / "train.py"


class Recorded:
    """Gives recorded draws, and checks that these are the ones asked for."""

    def __init__(self, ranges: list[list[int]], values: list[int], uniform: float = 0.0) -> None:
        self.left, self.uniform = list(zip(ranges, values, strict=True)), uniform

    def random(self) -> float:
        return self.uniform

    def integers(self, low: int, high: int, *, endpoint: bool) -> int:
        (wanted, value), *self.left = self.left
        assert endpoint and [low, high] == wanted
        return value


def bits(mask: torch.Tensor) -> str:
    return "".join(str(int(m)) for m in mask)


def test_masks_of_every_strategy_for_the_recorded_draws() -> None:
    """Where the reference fails or masks every frame, ours keep one to learn."""
    compared = short = 0
    for strategy, frames, ranges, values, wanted in REFERENCE["rows"]:
        if wanted.startswith("error") or "1" not in wanted:
            short += 1
            continue
        draws = Recorded(ranges, values)
        assert bits(frame_mask(strategy, frames, draws)) == wanted and not draws.left, (
            strategy,
            frames,
        )
        compared += 1
    # 4 quarters of 2 and 3 frames, head and tail of 2.
    assert compared + short == len(REFERENCE["rows"]) and short == 9


def test_one_uniform_draw_picks_the_strategy_in_the_order_given() -> None:
    for ratios, drawn, wanted in REFERENCE["selection"]:
        assert bits(draw_frame_mask(ratios, 6, Recorded([], [], drawn))) == wanted, (ratios, drawn)


def test_short_clips_take_the_nearest_mask() -> None:
    one = Recorded([], [])
    nearest = {
        ("quarter_head", 2): "01",
        ("quarter_head", 3): "011",
        ("quarter_tail", 2): "10",
        ("quarter_tail", 3): "110",
        ("quarter_head_tail", 2): "01",  # the beginning stays given, the end is predicted
        ("quarter_head_tail", 3): "010",
    }

    for (strategy, frames), wanted in nearest.items():
        assert bits(frame_mask(strategy, frames, Recorded([[1, 1]], [1]))) == wanted
    assert bits(frame_mask("image_head_tail", 2, one)) == "01"
    assert bits(frame_mask("quarter_random", 3, Recorded([[1, 1], [0, 2]], [1, 1]))) == "101"

    for strategy in STRATEGIES:
        for frames in range(1, 25):
            for seed in range(20):
                mask = frame_mask(strategy, frames, generator(seed, "frame_mask"))
                assert mask.dtype == torch.bool and len(mask) == frames and mask.any()
                assert frames > 1 or mask.all()


def test_random_gives_each_frame_with_a_chance_between_a_tenth_and_nine_tenths() -> None:
    shares = [
        1 - frame_mask("random", 400, generator(seed, "x")).float().mean().item()
        for seed in range(300)
    ]
    assert 0.03 < min(shares) < 0.15 and 0.85 < max(shares) < 0.97
    assert np.mean(shares) == pytest.approx(0.5, abs=0.05)


def test_names_of_open_sora_1_1_and_1_2() -> None:
    found = check_mask_ratios(
        {"mask_no": 0.75, "mask_quarter_head_tail": 0.05, "intepolate": 0.1, "random": 0.1}
    )
    assert list(found) == ["identity", "quarter_head_tail", "interpolate", "random"]
    assert found["interpolate"] == 0.1


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({"image_hed": 0.1}, "got the mask strategy 'image_hed' in mask_ratios; expected.*did you"),
        ({"xyz": 0.1}, "got the mask strategy 'xyz'.*take one of these"),
        ({"image_head": -0.1}, r"got mask_ratios \{'image_head': -0.1\} that .* numbers from 0 to"),
        ({"image_head": float("nan")}, "expected numbers from 0 to 1"),
        ({"image_head": 0.7, "random": 0.4}, "that sum to 1.1; expected .* at most 1 in sum"),
        ({"intepolate": 0.1, "interpolate": 0.1}, "two names of the strategy 'interpolate'"),
    ],
)
def test_bad_ratios_are_refused(ratios: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_mask_ratios(ratios)


def test_configs_refuse_bad_ratios_and_models_that_do_not_fit_the_scheduler() -> None:
    for option, message in [
        ("mask_ratios={'image_hed': 0.1}", "did you mean 'image_head'"),
        ("mask_ratios={'image_head': 1.5}", "expected numbers from 0 to 1"),
        ("scheduler={'type': 'iddpm'}", "set model.pred_sigma=True, or scheduler"),
        (
            "scheduler={'type': 'iddpm', 'learn_sigmas': True}",
            "unknown key 'scheduler.learn_sigmas'.*'learn_sigma'",
        ),
        (
            "scheduler={'type': 'rflow', 'sample_method': 'normal'}",
            "got scheduler.sample_method = 'normal'",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            load_train_config(DEMO, [option])


def make_batch(cfg, micro_batch: int, ids: list[int]):
    config = SimpleNamespace(
        class_dropout_prob=0.0, drop_path=0.0, patch_size=(2, 2, 2), in_channels=3
    )
    source = Encoders(PatchPoolVAE((1, 4, 4)), HashedBagOfWords(8, 4), torch.device("cpu"))
    videos = [torch.randn(3, 7, 8, 8, generator=torch.Generator().manual_seed(i)) for i in ids]
    clips = [Clip(video=video, text="a", fps=8.0) for video in videos]
    return batch_of(cfg, config, features_of(source, clips), micro_batch, ids)


@pytest.mark.parametrize(
    "scheduler", ["{'type': 'rflow'}", "{'type': 'iddpm', 'learn_sigma': False}"]
)
def test_batches_draw_masks_by_name_and_keep_conditioning_frames(scheduler: str) -> None:
    """Draws depend on (seed, micro-batch, sample) alone; masks fill patches of 2 of 7 frames."""
    options = ["mask_ratios={'image_head': 0.4, 'random': 0.5}", f"scheduler={scheduler}"]
    cfg = load_train_config(DEMO, options)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    states = random.getstate(), torch.get_rng_state()
    batch = make_batch(cfg, 3, list(range(20)))

    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    swapped = make_batch(cfg, 3, [19, 5])
    x_mask, t = batch.inputs["x_mask"], batch.inputs["timestep"]
    assert torch.equal(swapped.inputs["x_mask"], x_mask[[19, 5]]) and torch.equal(
        swapped.x_t, batch.x_t[[19, 5]]
    )
    assert not torch.equal(make_batch(cfg, 4, list(range(20))).inputs["x_mask"], x_mask)
    assert x_mask.shape == (20, 7) and torch.equal(x_mask[:, 0:6:2], x_mask[:, 1:6:2])
    assert x_mask.any(1).all() and not x_mask.all() and len(t) == 20

    given = ~x_mask[:, None, :, None, None].expand_as(batch.x_t)
    off = (batch.x_t - batch.noised.x_start).abs()
    assert off[given].max() < (1e-6 if "rflow" in scheduler else 0.06) and off[~given].mean() > 0.3

    plain = make_batch(load_train_config(DEMO, [f"scheduler={scheduler}"]), 3, [19, 5])
    assert plain.inputs["x_mask"] is None
    # The other draws are those without it.
    assert torch.equal(plain.x_t[~given[[19, 5]]], swapped.x_t[~given[[19, 5]]])
