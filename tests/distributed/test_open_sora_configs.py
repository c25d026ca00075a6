"""Configs written for Open-Sora 1.0 to 1.3 load, train and sample; what their keys become."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import av
import pytest
import torch
import torch.distributed as dist
from open_sora_configs import (
    CASES,
    SAMPLING,
    SAMPLING_1_3,
    V1_0,
    V1_1,
    V1_2,
    V1_3,
    V1_3_ADAPT,
    V1_3_EVAL,
    V1_3_NOISE,
)
from ranks import run_ranks
from runs import write_toy_set
from safetensors.torch import load_file, save_file

from opensora_sp.config import dump_config, load_inference_config, load_train_config
from opensora_sp.config.draft import Draft
from opensora_sp.config.open_sora import RULES, translate
from opensora_sp.data.manifest import Entry, Manifest, write_manifest
from opensora_sp.models import build_model

TINY = [
    "vae=dict(type='PatchPoolVAE', pool=(1, 16, 16))",
    "text_encoder=dict(type='HashedBagOfWords', width=8, max_length=12)",
    *("model.in_channels=3", "model.caption_channels=8", "model.hidden_size=24"),
    *("model.depth=1", "model.num_heads=3", "model.model_max_length=12", "num_workers=0"),
]


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text.lstrip())


def test_training_configs_load_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, v10=V1_0, v11=V1_1, v12=V1_2)
    first = load_train_config(tmp_path / "v10.py")
    assert (first.size, first.num_frames, first.sp_size, first.zero_stage) == ((256, 256), 16, 2, 2)
    assert first.model["input_size"] == (16, 32, 32) and first.model["attention"] == "auto"
    assert first.dataset.manifest == "CSV_PATH" and first.dataset.frame_interval == 2
    assert first.dataset.clip_start == "random" and first.optimizer.lr == 2e-5
    assert first.ema_decay == 0.9999
    assert first.mask_ratios is not None and first.mask_ratios["quarter_head_tail"] == 0.1

    second = load_train_config(tmp_path / "v11.py", ["dataset.manifest=x.csv"])
    assert second.model["qk_norm_legacy"] is True and second.model["model_max_length"] == 200
    assert second.scheduler["type"] == "iddpm" and second.num_frames == 16
    assert second.batch_size == 2
    assert second.text_encoder["dtype"] == "fp16" and second.vae["dtype"] == "bf16"
    assert second.text_encoder["clean_captions"]
    assert second.mask_ratios is not None and second.mask_ratios["quarter_head"] == 0.1

    third = load_train_config(tmp_path / "v12.py", ["dataset.data_path=x.csv", "lr=3e-4"])
    assert third.freeze == ("y_embedder.*",) and third.epochs == 1 and third.warmup_steps == 1000
    assert third.optimizer.lr == 3e-4 and third.optimizer.eps == 1e-15 and third.ema_decay == 0.99
    assert third.dataset.manifest == "x.csv" and third.vae["micro_frame_size"] == 17


def test_configs_of_1_3_load(tmp_path: Path) -> None:
    """Its code implies conditioning frames, 16 channels, its frame count and its wording."""
    write(tmp_path, v13=V1_3, sample=SAMPLING_1_3)
    cfg = load_train_config(tmp_path / "v13.py", ["dataset.manifest=x.csv"])
    assert cfg.model["use_cond"] is True and cfg.model["in_channels"] == 16
    assert cfg.mask_types is not None and cfg.mask_types["i2v_head"] == 5
    assert cfg.scheduler["drop_condition"]["keep"] == 0.7
    assert cfg.scheduler["legacy_frame_count"] == "v1.3"
    assert cfg.vae["temporal_overlap"] and cfg.vae["normalization"] == "video"
    # Of a step, where Open-Sora counts its two micro-batches.
    assert (cfg.accumulation_steps, cfg.warmup_steps) == (2, 500)
    assert cfg.ema_decay == pytest.approx(0.99**2) and not cfg.ema_warmup

    sampling = load_inference_config(tmp_path / "sample.py")
    assert sampling.cond_type == "i2v_head" and sampling.score_style == "words"
    assert sampling.scheduler["image_cfg_scale"] == 5.0 and sampling.scheduler["use_sdedit"]
    assert (sampling.num_frames, sampling.size) == (113, (360, 640))


def test_the_other_stages_of_1_3_load(tmp_path: Path) -> None:
    """Images with more latent channels; degraded clips; the evaluation script's."""
    write(tmp_path, adapt=V1_3_ADAPT, noise=V1_3_NOISE, evaluation=V1_3_EVAL)
    adapt = load_train_config(tmp_path / "adapt.py", ["dataset.manifest=x.csv"])
    assert adapt.convert == ("in_channels", "temporal_blocks") and adapt.model["skip_temporal"]
    assert adapt.model["in_channels"] == 16 and adapt.model["use_cond"]
    assert adapt.warmup_steps == 0 and adapt.model_spec.config.num_blocks == 28
    # What the command line sets replaces what keys of the file become, and joins other options.
    for options, convert in [
        (["convert=()"], ()),
        (["convert=['temporal_blocks']"], ("temporal_blocks",)),
        (["model.adapt_16ch=False"], ("temporal_blocks",)),
        (["convert=['pred_sigma']", "model.adapt_16ch=True"], ("in_channels", "pred_sigma")),
    ]:
        changed = load_train_config(tmp_path / "adapt.py", ["dataset.manifest=x.csv", *options])
        assert changed.convert == convert
    (tmp_path / "adapt.py").write_text(
        V1_3_ADAPT.replace("from_pretrained=None", "from_pretrained='w', freeze_y_embedder=True")
    )
    for options, found in ([], ("w", ("y_embedder.*",))), (["load=None", "freeze=()"], (None, ())):
        changed = load_train_config(tmp_path / "adapt.py", ["dataset.manifest=x.csv", *options])
        assert (changed.load, changed.freeze) == found

    noise = load_train_config(tmp_path / "noise.py", ["dataset.manifest=x.csv"])
    assert noise.noise_augmentation and noise.noise_prob is not None
    assert noise.noise_prob["gaussian_pixel"] == 0.5 and noise.noise_strength is not None
    for option, message in {
        "noise_prob=None": "got noise_augmentation with noise_prob None",
        "noise_prob.blur=1": "got noise_prob.blur = \"blur\"; expected 'downsample_spatial', ",
        "noise_prob.gaussian_feature=0.1": "noise_strength['gaussian_feature'] = None",
        "noise_strength.downsample_spatial=[3]": "= 3; expected 1, 2, 4 or 8",
        "noise_strength.downsample_spatial=0.5": "= 0.5; expected a list of ratios",
        "noise_strength.gaussian_pixel=2": "got noise_strength.gaussian_pixel = 2; expected a",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            load_train_config(tmp_path / "noise.py", ["dataset.manifest=x.csv", option])
    with pytest.raises(ValueError, match="noise_augmentation with dataset.type 'CachedFeatures'"):
        cached = ["dataset.type=CachedFeatures", "dataset.path=cache"]
        load_train_config(tmp_path / "noise.py", cached)

    evaluation = load_train_config(tmp_path / "evaluation.py", manifest="held.csv")
    assert evaluation.bucket_config == {"360p": {113: (1.0, 6)}}
    assert evaluation.dataset.manifest == "held.csv" and evaluation.epochs == 1000


BAD_1_3 = {
    "cond_type=v2v_loop": "expected 'i2v_head', 'i2v_tail', 'i2v_loop' or 'v2v_head'",
    "batch_size=2": "with model.use_cond True, scheduler 'rflow' and batch_size 2; expected a",
    "model.use_cond=False": "got cond_type 'i2v_head' with model.use_cond False",
    "vae.micro_frame_size=16": "got vae.micro_frame_size 16; expected 1 more than a multiple of 4",
    "vae.micro_batch_size=0": "got vae.micro_batch_size = 0; expected a number greater than or",
}


@pytest.mark.parametrize("option", BAD_1_3)
def test_options_of_1_3_that_do_not_fit(option: str, tmp_path: Path) -> None:
    write(tmp_path, sample=SAMPLING_1_3)
    with pytest.raises(ValueError, match=re.escape(BAD_1_3[option])):
        load_inference_config(tmp_path / "sample.py", [option])


def test_training_options_of_1_3_that_do_not_fit(tmp_path: Path) -> None:
    write(tmp_path, v13=V1_3)
    for option, message in {
        "mask_types={'i2v_haed': 1}": "got 'i2v_haed' in mask_types; expected one of",
        "mask_ratios={'image_head': 0.5}": "use_cond=True, 'rflow' and mask_ratios=None",
        "model.use_cond=False": "got mask_types with model.use_cond False",
        "scheduler.drop_condition={'both': 1}": "got 'both' in scheduler.drop_condition; expected",
        "mask_types={'none': 0}": "expected weights of at least 0, and one above",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            load_train_config(tmp_path / "v13.py", ["dataset.manifest=x.csv", option])


def test_what_is_missing_is_still_reported(tmp_path: Path) -> None:
    write(tmp_path, v12=V1_2)
    with pytest.raises(ValueError, match=r"with manifest None and path None; expected a manifest"):
        load_train_config(tmp_path / "v12.py")


def test_a_sampling_config_loads_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, sample=SAMPLING)
    cfg = load_inference_config(tmp_path / "sample.py")
    assert (cfg.size, cfg.num_frames, cfg.fps, cfg.save_fps) == ((240, 426), 51, 24, 8)
    assert cfg.ckpt == "hpcai-tech/OpenSora-STDiT-v3"
    assert cfg.outputs == "./samples/" and cfg.precision == "bf16"
    assert [one.prompt for one in cfg.prompts][1] == "|0|a hare|1|a dog" and cfg.aes == 6.5


@pytest.mark.parametrize(("old", "setting", "rest", "expected"), CASES)
def test_what_becomes_of_each_key(old: str, setting: Any, rest: dict, expected: dict | str) -> None:
    draft = Draft()
    for key, content in {**rest, old: setting}.items():
        draft.set(key, content, f"a.py:{key}")
    run = "sample" if {"fps", "prompt"} & rest.keys() else "train"

    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)) as error:
            translate(draft, run)  # type: ignore[arg-type]
        assert f"[a.py:{old}]" in str(error.value)
        return

    translate(draft, run)  # type: ignore[arg-type]
    for key, wanted in expected.items():
        assert draft.get(key) == wanted, key
    assert old not in draft or any(rule.new == old for rule in RULES)


def test_each_mapping_is_printed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, v12=V1_2)
    with caplog.at_level(logging.INFO, "opensora_sp"):
        load_train_config(tmp_path / "v12.py", ["dataset.manifest=x.csv", "lr=1"])
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "lr = 1 is optimizer.lr = 1 here" in line]) == 1
    without_effect = f"{tmp_path / 'v12.py'}:8: num_bucket_build_workers has no effect"
    assert any(line.startswith(without_effect) for line in lines)
    assert len(lines) == len(set(lines))


def test_the_command_line_wins_over_either_name(tmp_path: Path) -> None:
    write(tmp_path, v10=V1_0)
    cfg = load_train_config(
        tmp_path / "v10.py", ["optimizer.lr=0.5", "dataset.manifest=mine.csv", "dtype=fp32"]
    )
    assert (cfg.optimizer.lr, cfg.dataset.manifest, cfg.precision) == (0.5, "mine.csv", "fp32")
    assert cfg.dataset.clip_start == "random"
    with pytest.raises(ValueError, match=r"got both lr \[.*v10.py:\d+\] and optimizer.lr \[.*v10"):
        write(tmp_path, v10=V1_0 + "optimizer = dict(lr=1)\n")
        load_train_config(tmp_path / "v10.py")


def train_them(folder: Path) -> dict[str, Any]:
    """Two steps with each config, with every clip shared; with the first also from its dump."""
    from opensora_sp.plugin import current_device, launch
    from opensora_sp.training import metrics, trainer
    from opensora_sp.training.metrics import log_to
    from opensora_sp.training.preflight import preflight

    launch(0)
    metrics.draw_loss = lambda run_dir: None
    found: dict[str, Any] = {}
    for name in ("v10", "v11", "v12", "v13", "adapt", "noise", "v10_again"):
        path = folder / ("v10_dump.py" if name == "v10_again" else f"{name}.py")
        dumped = [f"outputs={folder / name}"]
        manifest = folder / ("clips.csv" if name == "v10" else "mixed.csv")
        own = [f"dataset.manifest={manifest}", "lr=1e-2", *TINY]
        own += (
            ["num_frames=3", "image_size=(32, 32)", "batch_size=2"]
            if name == "v10"
            else [*BUCKETED]
        )
        # Two micro-batches are a step.
        own += [*WINDOWED, "epochs=2"] if name in ("v13", "noise") else []
        own += [f"load={folder / 'v12' / 'step_00000002'}", *IMAGES] if name == "adapt" else []
        cfg = load_train_config(path, dumped if name == "v10_again" else [*dumped, *own])
        if name == "v10" and dist.get_rank() == 0:
            (folder / "v10_dump.py").write_text(dump_config(cfg))
        dataset, checkpoint = preflight(cfg, None)
        (folder / name).mkdir(exist_ok=True)
        log_to(folder / name, enabled=False)
        training = trainer.Trainer(cfg, dataset, checkpoint, current_device())
        before = {key: tensor.clone() for key, tensor in training.module.state_dict().items()}
        training.train(folder / name)
        after = training.module.state_dict()
        parameters = training.module.named_parameters()
        frozen = {key for key, parameter in parameters if not parameter.requires_grad}
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        found[name] = (training.cfg.max_steps, frozen, changed)
        dist.barrier()
    return found


BUCKETED = [
    "bucket_config={'144p': {1: (1.0, 2), 3: (1.0, 2)}}",
    "dataset.frame_interval=1",
    "warmup_steps=0",
]


# Heads whose width has a third of the channels for each axis, in windows.
WINDOWED = ["model.hidden_size=36", "model.kernel_size=(2, 2, -1)"]


# Four times the channels of the weights that are loaded.
IMAGES = [
    "bucket_config={'144p': {1: (1.0, 1)}}",
    "vae=dict(type='PatchDCTVAE', pool=(1, 16, 16), coefficients=2)",
    "model.in_channels=12",
]


def test_they_train(tmp_path: Path) -> None:
    write(tmp_path, v10=V1_0, v11=V1_1, v12=V1_2, v13=V1_3, adapt=V1_3_ADAPT, noise=V1_3_NOISE)
    manifest = write_toy_set(tmp_path, 4)
    rows = [
        one._replace(path=Path(one.path.name), num_frames=6, height=180, width=320)
        for one in Manifest(manifest)
    ]
    frames = [rows[0], rows[1], *(Entry(one.path, one.text, 1, 180, 320) for one in list(rows)[2:])]
    write_manifest(tmp_path / "mixed.csv", frames)
    found = run_ranks(2, train_them, tmp_path)[0]

    # One epoch of four clips, or two with as many micro-batches to a step.
    assert {steps for steps, *_ in found.values()} == {2}
    frozen = {name: {key.partition(".")[0] for key in keys} for name, (_, keys, _) in found.items()}
    assert frozen["v12"] - frozen["v11"] == {"y_embedder"} and "y_embedder" not in frozen["v10"]
    assert frozen["v13"] - frozen["v11"] == {"y_embedder"}
    assert all("final_layer.linear.weight" in changed for *_, changed in found.values())

    assert not any(key.startswith("temporal_blocks") for key in found["adapt"][2])
    assert "x_embedder.proj.weight" in found["adapt"][2]

    # Every step of 1.3 passes conditioning frames or zeros, so the second one changes these.
    embedders = {f"x_embedder_cond{part}.proj.bias" for part in ("", "_mask")}
    assert embedders <= found["v13"][2]

    last = [
        load_file(tmp_path / name / "step_00000002" / "model" / "model.safetensors")
        for name in ("v10", "v10_again")
    ]

    assert last[0].keys() == last[1].keys() and all(
        torch.equal(last[0][key], last[1][key]) for key in last[0]
    )


def test_one_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opensora_sp.checkpoint.model_config import write_model_config
    from opensora_sp.data.video import probe
    from opensora_sp.sampling import sample

    monkeypatch.chdir(tmp_path)
    write(tmp_path, sample=SAMPLING)
    (tmp_path / "prompts.txt").write_text("a red fox\n|0|a hare|1|a dog\n")
    options = [*TINY[:-1], "prompt=None", "prompt_path=prompts.txt", "num_frames=5", "flow=3"]
    options += ["resolution=32x48", "aspect_ratio=None", "scheduler.num_sampling_steps=2"]
    options += ["model.from_pretrained=weights", "model.pred_sigma=False"]
    cfg = load_inference_config(
        "sample.py", [*options, "dtype=fp32", "loop=2", "condition_frame_length=2"]
    )
    model = build_model(
        **{"name" if key == "type" else key: value for key, value in cfg.model.items()}
    )
    (tmp_path / "weights").mkdir()
    save_file(model.state_dict(), tmp_path / "weights" / "model.safetensors")
    write_model_config(tmp_path / "weights", "STDiT3", model.config)
    files = sample(cfg)
    assert [path.parent for path in files] == [Path("samples")] * 2
    first, second = (path.with_suffix(".json").read_text() for path in files)
    assert "a red fox aesthetic score: 6.5. motion score: 3.0." in first
    assert "|0|a hare aesthetic score: 6.5. motion score: 3.0.|1|a dog" in second
    found = probe(files[0])
    assert found.num_frames == 8
    with av.open(str(files[0])) as container:
        assert container.streams.video[0].average_rate == 8  # fps / frame_interval


def test_one_of_1_3_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    from opensora_sp.checkpoint.model_config import write_model_config
    from opensora_sp.data.video import probe
    from opensora_sp.sampling import sample

    monkeypatch.chdir(tmp_path)
    write(tmp_path, sample=SAMPLING_1_3)
    Image.new("RGB", (60, 40), "red").save("fox.png")
    options = [
        *TINY[:-1],
        *WINDOWED,
        *("num_frames=5", "resolution=32x48", "aspect_ratio=None", "dtype=fp32", "loop=2"),
        *("condition_frame_length=2", "cond_type=i2v_loop", "scheduler.num_sampling_steps=2"),
        *("model.from_pretrained=weights", "model.pred_sigma=False", "prompt=['a red fox']"),
    ]
    cfg = load_inference_config("sample.py", [*options, "reference_path=fox.png"])
    config = {"name" if key == "type" else key: value for key, value in cfg.model.items()}
    model = build_model(**config)
    (tmp_path / "weights").mkdir()
    save_file(model.state_dict(), tmp_path / "weights" / "model.safetensors")
    write_model_config(tmp_path / "weights", "STDiT3", model.config)

    (path,) = sample(cfg)
    assert probe(path).num_frames == 8
    assert "a red fox The aesthetic score is excellent." in path.with_suffix(".json").read_text()

    for more, message in {
        "reference_path=None": "got cond_type 'i2v_loop' with 0 references and mask_strategy None",
        "mask_strategy='0'": "with 1 references and mask_strategy '0'",
        "reference_path=none.png": "got reference 'none.png', which is not a file",
    }.items():
        bad = ["reference_path=fox.png", more][-1 if "reference" in more else 0 :]
        with pytest.raises(ValueError, match=re.escape(message)):
            sample(load_inference_config("sample.py", [*options, *bad]))
