"""Configs written for Open-Sora 1.0, 1.1 and 1.2: they load as they are, train, sample, and say what they become."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from runs import ROOT, write_toy_set
from safetensors.torch import load_file, save_file

from opensora_sp.config import dump_config, load_inference_config, load_train_config
from opensora_sp.config.draft import Draft
from opensora_sp.config.legacy import KEPT, RULES, Rule
from opensora_sp.config.translate import markdown, translate
from opensora_sp.data import Entry, Manifest, write_manifest
from opensora_sp.models import build_model
from opensora_sp.resolutions import SIZES

V1_0 = """
num_frames = 16
frame_interval = 2
image_size = (256, 256)

root = None
data_path = "CSV_PATH"
use_image_transform = False
num_workers = 4

dtype = "bf16"
grad_checkpoint = True
plugin = "zero2-seq"
sp_size = 2

model = dict(
    type="STDiT-XL/2",
    space_scale=0.5,
    time_scale=2 / 3,
    from_pretrained=None,
    enable_flashattn=True,
    enable_layernorm_kernel=True,
    enable_sequence_parallelism=True,
)
mask_ratios = [0.6, 0.1, 0.1, 0.1, 0.1]
vae = dict(type="VideoAutoencoderKL", from_pretrained="stabilityai/sd-vae-ft-ema")
text_encoder = dict(type="t5", from_pretrained="./pretrained/t5", model_max_length=120, shardformer=True)
scheduler = dict(type="iddpm", timestep_respacing="")

seed = 42
outputs = "outputs"
wandb = False
epochs = 1
log_every = 10
ckpt_every = 1000
load = None
batch_size = 8
lr = 2e-5
grad_clip = 1.0
"""
V1_1 = """
dataset = dict(
    type="VariableVideoTextDataset",
    data_path=None,
    num_frames=None,
    frame_interval=3,
    image_size=(None, None),
    transform_name="resize_crop",
)
bucket_config = {"240p": {1: (0.5, 20), 16: (0.3, 2), 64: (0.0, None)}, "512": {1: (0.4, 12)}}
mask_ratios = {"mask_no": 0.7, "mask_quarter_random": 0.1, "mask_image_head": 0.1, "mask_head": 0.1}
num_workers = 8
num_bucket_build_workers = 16
dtype = "bf16"
grad_checkpoint = False
plugin = "zero2"
sp_size = 2
model = dict(
    type="STDiT2-XL/2",
    from_pretrained=None,
    input_sq_size=512,
    qk_norm=True,
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
vae = dict(type="VideoAutoencoderKL", from_pretrained="sd-vae", micro_batch_size=4, local_files_only=True)
text_encoder = dict(type="t5", from_pretrained="t5", model_max_length=200, shardformer=True, local_files_only=True)
scheduler = dict(type="iddpm-speed", timestep_respacing="")
seed = 42
outputs = "outputs"
wandb = False
epochs = 1
log_every = 10
ckpt_every = 500
load = None
batch_size = 10  # only for logging
lr = 2e-5
grad_clip = 1.0
"""
V1_2 = """
dataset = dict(type="VariableVideoTextDataset", transform_name="resize_crop")
bucket_config = {"144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27)}, "512": {1: (0.1, 141)}}
grad_checkpoint = True
num_workers = 8
num_bucket_build_workers = 16
dtype = "bf16"
plugin = "zero2"
sp_size = 2
model = dict(
    type="STDiT3-XL/2",
    from_pretrained=None,
    qk_norm=True,
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    freeze_y_embedder=True,
)
vae = dict(type="OpenSoraVAE_V1_2", from_pretrained="hpcai/vae", micro_frame_size=17, micro_batch_size=4)
text_encoder = dict(type="t5", from_pretrained="t5", model_max_length=300, shardformer=True)
scheduler = dict(type="rflow", use_timestep_transform=True, sample_method="logit-normal")
mask_ratios = {"random": 0.2, "intepolate": 0.01, "quarter_head": 0.01, "image_head_tail": 0.05}
seed = 42
outputs = "outputs"
wandb = False
epochs = 1
log_every = 10
ckpt_every = 200
load = None
grad_clip = 1.0
lr = 1e-4
ema_decay = 0.99
adam_eps = 1e-15
warmup_steps = 1000
"""
SAMPLING = """
resolution = "240p"
aspect_ratio = "9:16"
num_frames = "2s"
fps = 24
frame_interval = 3
image_size = None
prompt = ['a fox {"reference_path": "fox.png", "mask_strategy": "0"}', "|0|a hare|1|a dog"]
prompt_path = None
save_dir = "./samples/"
seed = 42
batch_size = 1
multi_resolution = "STDiT2"
dtype = "bf16"
condition_frame_length = 5
align = 5
loop = 1
model = dict(
    type="STDiT3-XL/2",
    from_pretrained="hpcai-tech/OpenSora-STDiT-v3",
    qk_norm=True,
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    force_huggingface=True,
)
vae = dict(type="OpenSoraVAE_V1_2", from_pretrained="vae", micro_frame_size=17, micro_batch_size=4, cache_dir=None)
text_encoder = dict(type="t5", from_pretrained="t5", model_max_length=300, cache_dir=None)
scheduler = dict(type="rflow", use_timestep_transform=True, num_sampling_steps=30, cfg_scale=7.0)
aes = 6.5
flow = None
"""
TINY = [
    "vae=dict(_delete_=True, type='PatchPoolVAE', pool=(1, 16, 16))",
    "text_encoder=dict(_delete_=True, type='HashedBagOfWords', width=8, max_length=12)",
    *("model.in_channels=3", "model.caption_channels=8", "model.hidden_size=24", "model.depth=1", "model.num_heads=3"),
    *("model.model_max_length=12", "num_workers=0"),
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
    assert first.dataset.clip_start == "random" and first.optimizer.lr == 2e-5 and first.ema_decay == 0.9999
    assert first.mask_ratios is not None and first.mask_ratios["quarter_head_tail"] == 0.1
    second = load_train_config(tmp_path / "v11.py", ["dataset.manifest=x.csv"])
    assert second.model["qk_norm_legacy"] is True and second.model["model_max_length"] == 200
    assert second.scheduler["type"] == "iddpm" and second.num_frames == 16 and second.batch_size == 2
    assert second.text_encoder["dtype"] == second.vae["dtype"] == "bf16" and second.text_encoder["clean_captions"]
    assert second.mask_ratios is not None and second.mask_ratios["quarter_head"] == 0.1
    third = load_train_config(tmp_path / "v12.py", ["dataset.data_path=x.csv", "lr=3e-4"])
    assert third.freeze == ("y_embedder.*",) and third.epochs == 1 and third.warmup_steps == 1000
    assert third.optimizer.lr == 3e-4 and third.optimizer.eps == 1e-15 and third.ema_decay == 0.99
    assert third.dataset.manifest == "x.csv" and third.vae["micro_frame_size"] == 17


def test_what_is_missing_is_still_told(tmp_path: Path) -> None:
    write(tmp_path, v12=V1_2)
    with pytest.raises(ValueError, match=r"got no 'dataset.manifest'"):
        load_train_config(tmp_path / "v12.py")


def test_a_sampling_config_loads_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, sample=SAMPLING)
    cfg = load_inference_config(tmp_path / "sample.py")
    assert (cfg.size, cfg.num_frames, cfg.fps, cfg.save_fps) == ((240, 426), 51, 24, 8)
    assert cfg.ckpt == "hpcai-tech/OpenSora-STDiT-v3" and cfg.outputs == "./samples/" and cfg.precision == "bf16"
    assert [one.prompt for one in cfg.prompts][1] == "|0|a hare|1|a dog" and cfg.aes == 6.5


# What each rule makes of a value: the rest of the config, and the values expected here (None: no such key any more).
# An error is expected where the text says what to write instead.
CASES: dict[str, list[tuple[Any, dict[str, Any], dict[str, Any] | str]]] = {
    "data_path": [("a.csv", {}, {"dataset.manifest": "a.csv", "dataset.clip_start": "random"})],
    "root": [(None, {}, {}), ("/data", {}, "relative to the manifest")],
    "use_image_transform": [(False, {}, {}), (True, {}, {})],
    "frame_interval": [
        (3, {"dataset.type": "VideoText"}, {"dataset.frame_interval": 3}),
        (3, {"fps": 24}, {"save_fps": 8.0}),
        (3, {"fps": 24, "save_fps": 12}, {"save_fps": 12}),
    ],
    "batch_size": [
        (10, {"dataset.type": "VariableVideoTextDataset", "bucket_config": {"240p": {1: (1.0, 2)}}}, {}),
        (10, {"dataset.type": "VideoTextDataset"}, {"batch_size": 10}),
        (None, {}, {}),
    ],
    "dataset.num_frames": [(16, {}, {"num_frames": 16}), (None, {}, {}),
        (16, {"dataset.type": "VariableVideoTextDataset", "bucket_config": {"240p": {1: (1.0, 2)}}}, {})],
    "dataset.image_size": [((8, 9), {}, {"image_size": (8, 9)}), ((None, None), {}, {}),
        ((8, 9), {"dataset.type": "VariableVideoTextDataset", "bucket_config": {"240p": {1: (1.0, 2)}}}, {})],
    "dataset.data_path": [("a.csv", {}, {"dataset.manifest": "a.csv"}), (None, {}, {})],
    "dataset.transform_name": [("center", {}, {"dataset.transform": "resize_center_crop"}),
        ("resize_crop", {}, {"dataset.transform": "resize_center_crop"}), ("flip", {}, "expected one of ['center'")],
    "dataset.dummy_text_feature": [(False, {}, {}), (True, {}, "captions are encoded")],
    "dataset.type": [("VideoTextDataset", {}, {"dataset.type": "VideoText", "dataset.clip_start": "random"}),
        ("BatchFeatureDataset", {}, "clips are encoded while training"),
        ("VariableVideoTextDataset", {"dataset.clip_start": "middle"}, {"dataset.clip_start": "middle"})],
    "num_bucket_build_workers": [(16, {}, {})],
    "prefetch_factor": [(2, {}, {})],
    "load_text_features": [(False, {}, {}), (True, {}, "captions are encoded")],
    "mask_ratios": [([0.6, 0.1, 0.1, 0.1, 0.1], {}, {"mask_ratios.quarter_random": 0.1}),
        ({"mask_head": 0.5, "intepolate": 0.1}, {}, {"mask_ratios": {"quarter_head": 0.5, "intepolate": 0.1}})],
    "dtype": [("fp16", {"vae.type": "VideoAutoencoderKL"}, {"precision": "fp16", "vae.dtype": "fp16"}),
        ("fp32", {"vae.type": "Mine"}, {"precision": "fp32", "vae.dtype": None})],
    "plugin": [("zero2", {}, {"zero_stage": 2, "ema_decay": 0.9999}), ("zero2-seq", {"ema_decay": 0.9}, {"ema_decay": 0.9}),
        ("ddp", {}, "expected one of ['zero1', 'zero2', 'zero2-seq']")],
    "reduce_bucket_size_in_m": [(20, {}, {})],
    "record_time": [(True, {}, {}), (False, {}, {})],
    "model.qk_norm": [(True, {"model.type": "STDiT2-XL/2", "lr": 1.0}, {"model.qk_norm_legacy": True}),
        (True, {"model.type": "STDiT2-XL/2"}, {"model.qk_norm_legacy": None}),
        (True, {"model.type": "STDiT2-XL/2", "lr": 1.0, "model.qk_norm_legacy": False}, {"model.qk_norm_legacy": False})],
    "model.enable_flash_attn": [(True, {}, {"model.attention": "auto"}), (False, {}, {"model.attention": "sdpa"})],
    "model.enable_flashattn": [(True, {}, {"model.attention": "auto"}), (False, {}, {"model.attention": "sdpa"})],
    "model.enable_layernorm_kernel": [(True, {}, {})],
    "model.enable_sequence_parallelism": [(True, {}, {})],
    "model.use_x_mask": [(True, {}, {})],
    "model.no_temporal_pos_emb": [(False, {}, {}), (True, {}, "positions of frames")],
    "model.skip_temporal": [(False, {}, {}), (True, {}, "temporal attention")],
    "model.force_huggingface": [(True, {}, {})],
    "model.freeze_y_embedder": [(True, {}, {"freeze": ("y_embedder.*",)}), (False, {}, {"freeze": None}),
        (True, {"fps": 24}, {"freeze": None})],
    "model.only_train_temporal": [(True, {}, {"freeze": ("*", "!temporal_blocks.*")}), (True, {"fps": 24}, {}),
        (True, {"freeze": ("x_embedder.*",)}, {"freeze": ("x_embedder.*", "*", "!temporal_blocks.*")})],
    "model.freeze": [("text", {}, {"freeze": ("y_embedder.*",)}), ("not_temporal", {}, {"freeze": ("*", "!*attn_temp.*")}),
        ("all", {}, "expected one of ['text', 'not_temporal']"), ("text", {"fps": 24}, {})],
    "load": [("run", {"lr": 1.0}, {"load": "run"}), (None, {"lr": 1.0}, {"load": None})],
    "start_from_scratch": [(True, {}, {})],
    "model.from_pretrained": [("a", {}, {"load": "a"}), ("a", {"load": None}, {"load": "a"}), ("a", {"load": "b"}, {"load": "b"}),
        ("a", {"fps": 24}, {"ckpt": "a"}), (None, {}, {"load": None})],
    "vae.type": [("VideoAutoencoderPipeline", {}, "OpenSoraVAE_V1_2"), ("PatchPoolVAE", {}, {"vae.type": "PatchPoolVAE"})],
    "model.local_files_only": [(True, {}, {})],
    "vae.local_files_only": [(True, {}, {})],
    "text_encoder.local_files_only": [(True, {}, {})],
    "vae.cache_dir": [(None, {}, {}), ("/models", {}, "HF_HOME=FOLDER")],
    "text_encoder.cache_dir": [(None, {}, {}), ("/models", {}, "HF_HOME=FOLDER")],
    "vae.force_huggingface": [(True, {}, {})],
    "vae.freeze_vae_2d": [(True, {}, {})],
    "vae.cal_loss": [(True, {}, {})],
    "text_encoder.type": [("clip", {}, "type='t5'"), ("classes", {}, "type='t5'"), ("t5", {}, {"text_encoder.type": "t5"})],
    "text_encoder.model_max_length": [(200, {}, {"text_encoder.max_length": 200, "model.model_max_length": 200,
        "text_encoder.clean_captions": True})],
    "text_encoder.shardformer": [(True, {}, {"text_encoder.dtype": "bf16"}), (False, {}, {"text_encoder.dtype": None})],
    "scheduler.type": [("iddpm-speed", {}, {"scheduler.type": "iddpm"}), ("dpm-solver", {}, "num_sampling_steps=100")],
    "lr": [(1e-4, {}, {"optimizer.lr": 1e-4}), (1e-4, {"optimizer.lr": 1.0}, "got both lr")],
    "adam_eps": [(1e-15, {}, {"optimizer.eps": 1e-15})],
    "weight_decay": [(0.1, {}, {"optimizer.weight_decay": 0.1})],
    **{key: [(None, {}, {})] for key in ("warmup_steps", "grad_clip", "ema_decay", "epochs", "sp_size")},
    "prompt": [("a fox", {"fps": 24}, {"prompts": ["a fox"]}), (["a"], {"fps": 24}, {"prompts": ["a"]}), (None, {"fps": 24}, {})],
    "reference_path": [(["x.png", None], {"prompt": ["a", "b"]},
        {"prompts": [{"prompt": "a", "reference_path": "x.png"}, {"prompt": "b"}], "reference_path": None}),
        ("x.png", {"prompt": ["a"]}, {"reference_path": "x.png"}), (["x.png"], {"prompt": ["a", "b"]}, "one for each")],
    "mask_strategy": [(["0", None], {"prompts": ["a", "b"]}, {"prompts": [{"prompt": "a", "mask_strategy": "0"}, {"prompt": "b"}]})],
    "save_dir": [("out", {}, {"outputs": "out"})],
    "num_sample": [(3, {}, {"num_samples": 3})],
    "prompt_as_path": [(True, {}, {"skip_existing": True}), (False, {}, {"skip_existing": None})],
    "sample_name": [("x", {}, {})],
    "multi_resolution": [("STDiT2", {}, {})],
    "align": [(5, {}, {})],
    "verbose": [(2, {}, {})],
    "llm_refine": [(False, {}, {}), (True, {}, "no service is asked")],
    "watermark": [(False, {}, {}), (True, {}, "no watermark is drawn")],
    "start_index": [(0, {}, {}), (4, {}, "the prompts wanted")],
    "end_index": [(4, {}, "the prompts wanted")],
    "prompt_generator": [("", {}, {}), ("x", {}, "write the prompts into prompts")],
}  # fmt: skip
SAMPLING_ONLY = ("fps", "prompt", "prompts")


def run_of(old: str, rest: dict[str, Any]) -> str:
    of_rule = {rule.run for rule in RULES if rule.old == old}
    if any(key in rest for key in SAMPLING_ONLY) or of_rule == {"sample"}:
        return "sample"
    return "train"


def test_each_rule_has_its_cases() -> None:
    assert CASES.keys() == {rule.old for rule in RULES}


@pytest.mark.parametrize(
    ("old", "value", "rest", "expected"), [(old, *case) for old, cases in CASES.items() for case in cases]
)
def test_what_becomes_of_each_key(old: str, value: Any, rest: dict, expected: dict | str) -> None:
    draft, missing = Draft(), object()
    for key, said in {**rest, old: value}.items():
        draft.set(tuple(key.split(".")), said, f"a.py:{key}")
    run = run_of(old, rest)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)) as error:
            translate(draft, run)  # type: ignore[arg-type]
        assert f"[a.py:{old}]" in str(error.value) and "got" in str(error.value) and "expected" in str(error.value)
        return
    translate(draft, run)  # type: ignore[arg-type]
    for key, wanted in expected.items():
        assert draft.get(tuple(key.split("."))) == wanted, key
    rules = [rule for rule in RULES if rule.old == old and rule.run in (None, run)]
    kept = any(rule.new == old for rule in rules)
    assert kept or draft.get(tuple(old.split(".")), missing) is missing
    notes = [note for note in draft.notes if note.startswith(f"a.py:{old}: {old}")]
    silent = any(value is one or value == one for rule in rules for one in rule.inert)
    assert len(notes) <= 1 and (bool(notes) or silent or kept or old in ("reference_path", "mask_strategy"))


def test_keys_that_are_kept_are_known(tmp_path: Path) -> None:
    """``KEPT`` and the rules cover every key of the configs above, and every kept key is one of ours."""
    from opensora_sp.config import InferenceConfig, TrainConfig
    from opensora_sp.config.files import read_config

    write(tmp_path, v10=V1_0, v11=V1_1, v12=V1_2, sample=SAMPLING)
    known = {*KEPT, *(rule.old for rule in RULES)}
    for name in ("v10", "v11", "v12", "sample"):
        for key, value in read_config(tmp_path / f"{name}.py").values.items():
            inner = value if key in ("dataset", "model", "vae", "text_encoder", "scheduler") else {}
            assert {key, *(f"{key}.{part}" for part in inner)} <= known, (name, key)
    ours = {*TrainConfig.model_fields, *InferenceConfig.model_fields}
    assert {key for key in KEPT if "." not in key} <= ours


def test_each_mapping_is_printed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, v12=V1_2)
    with caplog.at_level(logging.INFO, "opensora_sp"):
        load_train_config(tmp_path / "v12.py", ["dataset.manifest=x.csv", "lr=1"])
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "lr = 1 is optimizer.lr = 1 here" in line]) == 1
    assert any(line.startswith(f"{tmp_path / 'v12.py'}:5: num_bucket_build_workers has no effect") for line in lines)
    assert len(lines) == len(set(lines))


def test_the_command_line_wins_over_either_name(tmp_path: Path) -> None:
    write(tmp_path, v10=V1_0)
    cfg = load_train_config(tmp_path / "v10.py", ["optimizer.lr=0.5", "dataset.manifest=mine.csv", "dtype=fp32"])
    assert (cfg.optimizer.lr, cfg.dataset.manifest, cfg.precision) == (0.5, "mine.csv", "fp32")
    with pytest.raises(ValueError, match=r"got both lr \[.*v10.py:\d+\] and optimizer.lr \[.*v10.py:\d+\]"):
        write(tmp_path, v10=V1_0 + "optimizer = dict(lr=1)\n")
        load_train_config(tmp_path / "v10.py")


def test_the_docs_have_the_table() -> None:
    assert markdown() in (ROOT / "docs" / "configs.md").read_text()


def train_them(folder: Path) -> dict[str, Any]:
    """Two steps with each config, sharing every clip; of the first also from its dump, and what stayed as it was."""
    from opensora_sp.plugin import current_device, launch
    from opensora_sp.training import run
    from opensora_sp.training.metrics import log_to

    launch(0)
    run.draw_loss = lambda run_dir: None
    found: dict[str, Any] = {}
    for name in ("v10", "v11", "v12", "v10_again"):
        path = folder / ("v10_dump.py" if name == "v10_again" else f"{name}.py")
        dumped = [f"outputs={folder / name}"]
        own = [f"dataset.manifest={folder / ('clips.csv' if name == 'v10' else 'mixed.csv')}", "lr=1e-2", *TINY]
        own += ["num_frames=3", "image_size=(32, 32)", "batch_size=2"] if name == "v10" else [BUCKETS, "warmup_steps=0"]
        cfg = load_train_config(path, dumped if name == "v10_again" else [*dumped, *own])
        if name == "v10" and dist.get_rank() == 0:
            (folder / "v10_dump.py").write_text(dump_config(cfg))
        dataset, checkpoint = run.preflight(cfg, None)
        (folder / name).mkdir(exist_ok=True)
        log_to(folder / name, enabled=False)
        training = run.Run(cfg, dataset, checkpoint, current_device())
        before = {key: tensor.clone() for key, tensor in training.module.state_dict().items()}
        training.steps(folder / name)
        after = training.module.state_dict()
        found[name] = (training.cfg.max_steps, {key for key in before if torch.equal(before[key], after[key])})
        dist.barrier()
    return found


BUCKETS = "bucket_config={'_delete_': True, '144p': {1: (1.0, 2), 3: (1.0, 2)}}"


def test_they_train(tmp_path: Path) -> None:
    write(tmp_path, v10=V1_0, v11=V1_1, v12=V1_2)
    manifest = write_toy_set(tmp_path, 4)
    rows = [one._replace(path=Path(one.path.name), num_frames=6, height=180, width=320) for one in Manifest(manifest)]
    frames = [rows[0], rows[1], *(Entry(one.path, one.text, 1, 180, 320) for one in rows[2:])]
    write_manifest(tmp_path / "mixed.csv", frames)
    assert SIZES["144p"]
    found = run_ranks(2, train_them, tmp_path)[0]
    assert {steps for steps, _ in found.values()} == {2}  # one epoch of four clips
    still = {name: {key.partition(".")[0] for key in same} for name, (_, same) in found.items()}
    assert "y_embedder" in still["v12"] and "x_embedder" not in still["v12"] and "final_layer" not in still["v12"]
    assert "y_embedder" not in still["v10"] | still["v11"]
    last = [
        load_file(tmp_path / name / "step_00000002" / "model" / "model.safetensors") for name in ("v10", "v10_again")
    ]
    assert last[0].keys() == last[1].keys() and all(torch.equal(last[0][key], last[1][key]) for key in last[0])


def test_one_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opensora_sp.data.video import probe
    from opensora_sp.sampling import sample
    from opensora_sp.weights import write_model_config

    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        sample=SAMPLING.replace("prompt = [", "unused = _unused = None\nprompt = [").replace("unused = _", "_"),
    )
    (tmp_path / "prompts.txt").write_text("a red fox\n|0|a hare|1|a dog\n")
    options = [*TINY[:-1], "prompt=None", "prompt_path=prompts.txt", "num_frames=5", "resolution=32x48", "flow=3"]
    options += [
        "aspect_ratio=None",
        "model.from_pretrained=weights",
        "scheduler.num_sampling_steps=2",
        "model.pred_sigma=False",
    ]
    cfg = load_inference_config("sample.py", [*options, "dtype=fp32", "loop=2", "condition_frame_length=2"])
    model = build_model(**{"name" if key == "type" else key: value for key, value in cfg.model.items()})
    (tmp_path / "weights").mkdir()
    save_file(model.state_dict(), tmp_path / "weights" / "model.safetensors")
    write_model_config(tmp_path / "weights", "STDiT3", model.config)
    files = sample(cfg)
    assert [path.parent for path in files] == [Path("samples")] * 2
    assert "a red fox aesthetic score: 6.5. motion score: 3.0." in files[0].with_suffix(".json").read_text()
    assert "|0|a hare aesthetic score: 6.5. motion score: 3.0.|1|a dog" in files[1].with_suffix(".json").read_text()
    found = probe(files[0])
    assert found.num_frames == 8
    import av

    with av.open(str(files[0])) as container:
        assert container.streams.video[0].average_rate == 8  # fps / frame_interval


def test_a_rule_says_why() -> None:
    for rule in RULES:
        assert isinstance(rule, Rule) and (rule.new or rule.note or rule.refused), rule.old
