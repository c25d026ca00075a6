"""Settings without effect: each has a line in the log; verification, and kernels in fp64."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from runs import ROOT, TRAIN

from opensora_sp.config import (
    check_launch,
    load_inference_config,
    load_train_config,
    unused_settings,
)
from opensora_sp.models import build_model
from opensora_sp.parallel import SequenceMesh, parallelize

SAMPLE = ROOT / "configs" / "demo" / "sample.py"
SHARED = "sequence_parallel"

# Options, ranks that share a batch, and the lines: of the key that has no effect, and why.
TRAINING = [
    (["batch_order=mixed"], 2, "batch_order='mixed' .* without bucket_config"),
    (["keep_every=5"], 2, "keep_every=5 .* all checkpoints are kept"),
    (["keep_every=5", "keep_last=1"], 2, None),
    (["noise_prob.gaussian_pixel=0.5"], 2, "noise_prob={.*} .* noise_augmentation is False"),
    (["convert=('pred_sigma',)", "load=None"], 2, "convert=.* load is None"),
    (
        ["accumulation_steps=2", "micro_batches_per_step=None", "zero_stage=1"],
        2,
        "zero_stage=1 .* at both stages",
    ),
    (["zero_stage=1"], 2, None),
    (
        [f"{SHARED}.recompute_communication=True", "grad_checkpoint=False"],
        2,
        "recompute_communication=True has no effect: nothing is recomputed",
    ),
    ([f"{SHARED}.recompute_communication=True", "grad_checkpoint=1"], 2, None),
    ([f"{SHARED}.strategy=ulysses"], 1, "strategy='ulysses' .* no ranks share a batch"),
    ([f"{SHARED}.strategy=ulysses"], 2, None),
    (["validation={'every': 1, 'prompts': ['a'], 'bins': 3}"], 2, "validation.bins=3 .* manifest"),
    (
        ["validation={'every':1, 'prompts':['a'], 'negative_prompt':'b', 'cfg_scale':1}"],
        2,
        "validation.negative_prompt='b' .* no guidance",
    ),
    (
        ["validation={'every': 1, 'manifest': 'held.csv', 'cfg_scale': 3.0}"],
        2,
        "validation.cfg_scale=3.0 .* no prompts",
    ),
]
SAMPLING = [
    (["prompt_path=more.txt", "prompts=['a']"], "prompt_path='more.txt' .* take its place"),
    (["prompt_path=more.txt", "prompts=[]"], None),
    (["score_style=words"], "score_style='words' .* aes and flow are None"),
    (["score_style=words", "aes=5.0"], None),
    (["negative_prompt=blurred", "scheduler.cfg_scale=1"], "negative_prompt='b.*no guidance"),
    (["negative_prompt=blurred", "scheduler.cfg_scale=2"], None),
    (["condition_frame_length=2"], "condition_frame_length=2 .* loop is 1"),
    (["condition_frame_length=2", "loop=2"], None),
    ([f"{SHARED}.overlap_backward=True"], "overlap_backward=True .* no backward pass"),
]


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN.format(manifest="clips.csv"))
    return tmp_path / "train.py"


def check(lines: list[str], wanted: str | None) -> None:
    """There is the wanted line alone, or none."""
    assert len(lines) == (wanted is not None), lines
    for line in lines:
        assert re.search(wanted or "", line), line


@pytest.mark.parametrize(("options", "ranks", "wanted"), TRAINING, ids=str)
def test_training_names_what_has_no_effect(
    train: Path, options: list[str], ranks: int, wanted: str | None
) -> None:
    check(unused_settings(load_train_config(train, options), ranks), wanted)


@pytest.mark.parametrize(("options", "wanted"), SAMPLING, ids=str)
def test_sampling_names_what_has_no_effect(options: list[str], wanted: str | None) -> None:
    check(unused_settings(load_inference_config(SAMPLE, options), 2), wanted)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "stdit3" / "train").glob("*.py")))
def test_shipped_configs_set_nothing_in_vain(path: Path) -> None:
    assert unused_settings(load_train_config(path), 2) == []


def test_verification_without_shared_batches_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model("STDiT3", hidden_size=24, depth=1, num_heads=2)
    with caplog.at_level(logging.INFO):
        parallelize(model, SequenceMesh(1), verify=True)
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "verify=True has no effect: no ranks share a batch"
    ]


def test_triton_in_fp64_is_refused_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = ["precision=fp64", "cost_model=H100"]
    check_launch(load_inference_config(SAMPLE, options), 1)
    with pytest.raises(ValueError, match="got kernels='triton' for tokens in float64"):
        check_launch(load_inference_config(SAMPLE, [*options, "kernels=triton"]), 1)
