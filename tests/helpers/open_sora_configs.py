"""Configs in the manner of Open-Sora, and what becomes of each key that is said otherwise here."""

from __future__ import annotations

from typing import Any

KEPT = (
    "num_frames", "image_size", "resolution", "aspect_ratio", "sp_size", "seed", "model", "vae",
    "text_encoder", "scheduler", "dataset", "bucket_config", "batch_size", "num_workers",
    "grad_checkpoint", "grad_clip", "epochs", "warmup_steps", "ema_decay", "log_every",
    "ckpt_every", "outputs", "wandb", "load", "mask_ratios", "fps", "save_fps", "prompt_path",
    "loop", "condition_frame_length", "condition_frame_edit", "reference_path", "mask_strategy",
    "aes", "flow", "camera_motion", "dataset.frame_interval", "model.type", "model.qk_norm",
    "model.qk_norm_legacy", "model.input_sq_size", "model.space_scale", "model.time_scale",
    "vae.type", "vae.from_pretrained", "vae.subfolder", "vae.micro_batch_size",
    "vae.micro_frame_size", "text_encoder.type", "text_encoder.from_pretrained", "scheduler.type",
    "scheduler.num_sampling_steps", "scheduler.cfg_scale", "scheduler.cfg_channel",
    "scheduler.timestep_respacing", "scheduler.use_timestep_transform",
    "scheduler.use_discrete_timesteps", "scheduler.sample_method", "cond_type", "mask_types",
    "model.use_spatial_rope", "model.class_dropout_prob", "vae.z_channels",
    "vae.micro_batch_size_2d", "vae.use_tiled_conv3d", "vae.tile_size", "vae.normalization",
    "vae.temporal_overlap", "noise_augmentation", "noise_prob", "noise_strength",
    "scheduler.scale_image_weight", "scheduler.initial_image_scale",
    "scheduler.use_oscillation_guidance", "scheduler.use_flaw_fix", "scheduler.drop_condition",
)  # fmt: skip
"""Keys of public configs that have the same meaning here."""

# Of all trainings.
LOGGED = """seed = 42
outputs = "outputs"
wandb = False
epochs = 1
grad_clip = 1.0
"""
V1_0 = (
    """
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
text_encoder = dict(
    type="t5", from_pretrained="./pretrained/t5", model_max_length=120, shardformer=True
)
scheduler = dict(type="iddpm", timestep_respacing="")

log_every = 10
ckpt_every = 1000
load = None
batch_size = 8
lr = 2e-5
"""
    + LOGGED
)
V1_1 = (
    """
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
vae = dict(
    type="VideoAutoencoderKL", from_pretrained="sd-vae", micro_batch_size=4, local_files_only=True
)
text_encoder = dict(
    type="t5",
    from_pretrained="t5",
    model_max_length=200,
    shardformer=True,
    local_files_only=True,
)
scheduler = dict(type="iddpm-speed", timestep_respacing="")
log_every = 10
ckpt_every = 500
load = None
batch_size = 10  # only for logging
lr = 2e-5
"""
    + LOGGED
)
V1_2 = (
    """
dataset = dict(type="VariableVideoTextDataset", transform_name="resize_crop")
bucket_config = {
    "144p": {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27)},
    "512": {1: (0.1, 141)},
}
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
vae = dict(
    type="OpenSoraVAE_V1_2", from_pretrained="hpcai/vae", micro_frame_size=17, micro_batch_size=4
)
text_encoder = dict(type="t5", from_pretrained="t5", model_max_length=300, shardformer=True)
scheduler = dict(type="rflow", use_timestep_transform=True, sample_method="logit-normal")
mask_ratios = {"random": 0.2, "intepolate": 0.01, "quarter_head": 0.01, "image_head_tail": 0.05}
log_every = 10
ckpt_every = 200
load = None
lr = 1e-4
ema_decay = 0.99
adam_eps = 1e-15
warmup_steps = 1000
"""
    + LOGGED
)
VAE_1_3 = """
vae = dict(
    type="OpenSoraVAE_V1_3",
    from_pretrained="hpcai/vae",
    z_channels=16,
    micro_batch_size=1,
    micro_batch_size_2d=4,
    micro_frame_size=17,
    use_tiled_conv3d=True,
    tile_size=4,
    normalization="video",
    temporal_overlap=True,
    force_huggingface=True,
)
"""
V1_3 = f"""
dataset = dict(type="VariableVideoTextDataset", transform_name="resize_crop")
bucket_config = {{"360p": {{49: (1.0, 10), 113: (1.0, 4)}}, "720p": {{49: (0.25, 2)}}}}
drop_condition = {{"cond": 0.1, "text": 0.1, "null": 0.1, "keep": 0.7}}
mask_types = {{"i2v_head": 5, "i2v_tail": 2, "v2v_head_noisy": 2, "other": 1, "none": 2}}
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
    class_dropout_prob=0.1,
    kernel_size=(8, 8, -1),
    use_spatial_rope=True,
)
{VAE_1_3}
text_encoder = dict(type="t5", from_pretrained="t5", model_max_length=300, shardformer=True)
scheduler = dict(
    type="rflow",
    use_timestep_transform=True,
    sample_method="logit-normal",
    drop_condition=drop_condition,
)
log_every = 8
ckpt_every = 200
lr = 1e-4
ema_decay = 0.99
adam_eps = 1e-15
warmup_steps = 1000
use_cosine_scheduler = False
accumulation_steps = 2
{LOGGED}"""
V1_3_ADAPT = f"""
dataset = dict(type="VariableVideoTextDataset", transform_name="resize_crop")
bucket_config = {{"360p": {{1: (1.0, 8)}}, "1080p": {{1: (0.5, 1)}}}}
warmup = 1000
num_workers = 8
dtype = "bf16"
plugin = "zero2"
sp_size = 2
model = dict(
    type="STDiT3-XL/2",
    from_pretrained=None,
    qk_norm=True,
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    adapt_16ch=True,
    skip_temporal=True,
)
{VAE_1_3}
text_encoder = dict(type="t5", from_pretrained="t5", model_max_length=300, shardformer=True)
scheduler = dict(type="rflow", use_timestep_transform=True, sample_method="logit-normal")
epochs = 1
load = None
lr = 1e-4
ema_decay = 0.99
"""
V1_3_NOISE = (
    V1_3
    + """
noise_augmentation = True
noise_prob = {"gaussian_pixel": 0.5, "downsample_spatial": 0.2, "downsample_temporal": 0.2}
noise_strength = {
    "gaussian_pixel": 0.4,
    "downsample_spatial": [2, 4, 4, 8],
    "downsample_temporal": [2, 4, 8],
}
"""
)
V1_3_EVAL = f"""
num_workers = 8
dtype = "bf16"
seed = 42
num_eval_timesteps = 10
dataset = dict(type="VariableVideoTextDataset", transform_name="resize_crop")
bucket_config = {{"360p": {{113: (None, 6)}}}}
model = dict(
    type="STDiT3-XL/2",
    from_pretrained=None,
    qk_norm=True,
    enable_flash_attn=True,
    kernel_size=(8, 8, -1),
    use_spatial_rope=True,
)
{VAE_1_3}
text_encoder = dict(type="t5", from_pretrained="t5", model_max_length=300)
scheduler = dict(type="rflow")
"""
SAMPLING_1_3 = f"""
num_frames = 113
resolution = "360p"
aspect_ratio = "9:16"
fps = 24
frame_interval = 1
save_dir = "samples"
multi_resolution = "STDiT2"
seed = 42
batch_size = 1
dtype = "bf16"
cond_type = "i2v_head"
condition_frame_length = 5
use_sdedit = True
use_oscillation_guidance_for_text = True
use_oscillation_guidance_for_image = True
model = dict(
    type="STDiT3-XL/2",
    from_pretrained="hpcai-tech/OpenSora-STDiT-v4",
    qk_norm=True,
    enable_flash_attn=True,
    enable_layernorm_kernel=True,
    kernel_size=(8, 8, -1),
    use_spatial_rope=True,
    class_dropout_prob=0.0,
    force_huggingface=True,
)
{VAE_1_3}
text_encoder = dict(type="t5", from_pretrained="t5", model_max_length=300)
scheduler = dict(
    type="rflow",
    use_timestep_transform=True,
    num_sampling_steps=30,
    cfg_scale=7.5,
    scale_image_weight=True,
    initial_image_scale=1.0,
)
image_cfg_scale = 5.0
aes = 7.0
flow = None
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
vae = dict(
    type="OpenSoraVAE_V1_2",
    from_pretrained="vae",
    micro_frame_size=17,
    micro_batch_size=4,
    cache_dir=None,
)
text_encoder = dict(type="t5", from_pretrained="t5", model_max_length=300, cache_dir=None)
scheduler = dict(type="rflow", use_timestep_transform=True, num_sampling_steps=30, cfg_scale=7.0)
aes = 6.5
flow = None
"""
BUCKETED = {"dataset.type": "VariableVideoTextDataset", "bucket_config": {"240p": {1: (1.0, 2)}}}
# What each rule makes of a value: the value, the rest of the config, and the values expected here
# (None: no such key any more). An error is expected where the text says what to write instead.
CASES: dict[str, list[tuple[Any, dict[str, Any], dict[str, Any] | str]]] = {
    "data_path": [("a.csv", {}, {"dataset.manifest": "a.csv", "dataset.clip_start": "random"})],
    "root": [(None, {}, {}), ("/data", {}, "relative to the manifest")],
    "use_image_transform": [(False, {}, {}), (True, {}, {})],
    "frame_interval": [
        (3, {"dataset.type": "VideoText"}, {"dataset.frame_interval": 3}),
        (3, {"fps": 24}, {"save_fps": 8.0}),
        (3, {"fps": 24, "save_fps": 12}, {"save_fps": 12}),
        (0, {"fps": 24}, "expected a value of Open-Sora's"),
    ],
    "batch_size": [
        (10, BUCKETED, {}),
        (10, {"dataset.type": "VideoTextDataset"}, {"batch_size": 10}),
        (None, {}, {}),
    ],
    "dataset.num_frames": [
        (16, {}, {"num_frames": 16}),
        (None, {}, {}),
        (16, BUCKETED, {}),
    ],
    "dataset.image_size": [
        ((8, 9), {}, {"image_size": (8, 9)}),
        ((None, None), {}, {}),
        ((8, 9), BUCKETED, {}),
    ],
    "dataset.data_path": [("a.csv", {}, {"dataset.manifest": "a.csv"}), (None, {}, {})],
    "dataset.transform_name": [
        ("center", {}, {"dataset.transform": "resize_center_crop"}),
        ("resize_crop", {}, {"dataset.transform": "resize_center_crop"}),
        ("flip", {}, "expected one of ['center'"),
    ],
    "dataset.dummy_text_feature": [(False, {}, {}), (True, {}, "captions are encoded")],
    "dataset.type": [
        ("VideoTextDataset", {}, {"dataset.type": "VideoText", "dataset.clip_start": "random"}),
        ("BatchFeatureDataset", {}, "clips are encoded in training"),
        (
            "VariableVideoTextDataset",
            {"dataset.clip_start": "middle"},
            {"dataset.clip_start": "middle"},
        ),
    ],
    "num_bucket_build_workers": [(16, {}, {})],
    "prefetch_factor": [(2, {}, {})],
    "bucket_config": [
        (
            {"360p": {113: (None, 6)}},
            {"dtype": "bf16"},
            {"bucket_config": {"360p": {113: (1.0, 6)}}, "epochs": 1000},
        ),
        (
            {"360p": {113: (None, 6)}},
            {},
            {"bucket_config": {"360p": {113: (None, 6)}}, "epochs": None},
        ),
        ({"360p": {1: (0.5, 6)}}, {"lr": 1.0, "epochs": 2}, {"epochs": 2}),
    ],
    "num_eval_timesteps": [(10, {}, {})],
    "load_text_features": [(False, {}, {}), (True, {}, "captions are encoded")],
    "mask_ratios": [
        ([0.6, 0.1, 0.1, 0.1, 0.1], {}, {"mask_ratios.quarter_random": 0.1}),
        (
            {"mask_head": 0.5, "intepolate": 0.1},
            {},
            {"mask_ratios": {"quarter_head": 0.5, "intepolate": 0.1}},
        ),
    ],
    "dtype": [
        ("fp16", {"vae.type": "VideoAutoencoderKL"}, {"precision": "fp16", "vae.dtype": "fp16"}),
        ("fp32", {"vae.type": "Mine"}, {"precision": "fp32", "vae.dtype": None}),
    ],
    "plugin": [
        ("zero2", {}, {"zero_stage": 2, "ema_decay": 0.9999, "ema_warmup": False}),
        ("zero2-seq", {"ema_decay": 0.9}, {"ema_decay": 0.9}),
        ("ddp", {}, "expected one of ['zero1', 'zero2', 'zero2-seq']"),
    ],
    "reduce_bucket_size_in_m": [(20, {}, {})],
    "record_time": [(True, {}, {}), (False, {}, {})],
    "model.qk_norm": [
        (True, {"model.type": "STDiT2-XL/2", "lr": 1.0}, {"model.qk_norm_legacy": True}),
        (True, {"model.type": "STDiT2-XL/2"}, {"model.qk_norm_legacy": None}),
        (
            True,
            {"model.type": "STDiT2-XL/2", "lr": 1.0, "model.qk_norm_legacy": False},
            {"model.qk_norm_legacy": False},
        ),
    ],
    "model.enable_flash_attn": [
        (True, {}, {"model.attention": "auto"}),
        (False, {}, {"model.attention": "sdpa"}),
    ],
    "model.enable_flashattn": [
        (True, {}, {"model.attention": "auto"}),
        (False, {}, {"model.attention": "sdpa"}),
    ],
    "model.kernel_size": [
        (
            (8, 8, -1),
            {"lr": 1.0},
            {
                "model.kernel_size": (8, 8, -1),
                "model.use_cond": True,
                "model.in_channels": 16,
                "scheduler.legacy_frame_count": "v1.3",
                "score_style": None,
            },
        ),
        ((8, 8, -1), {"fps": 24, "dtype": "bf16"}, {"score_style": "words"}),
        ((8, 8, -1), {}, {"model.use_cond": None}),
        (None, {"lr": 1.0}, {"model.use_cond": None}),
    ],
    "model.enable_layernorm_kernel": [(True, {}, {})],
    "model.enable_sequence_parallelism": [(True, {}, {})],
    "model.use_x_mask": [(True, {}, {})],
    "model.no_temporal_pos_emb": [(False, {}, {}), (True, {}, "temporal position embeddings")],
    "model.skip_temporal": [
        (False, {}, {"model.skip_temporal": None}),
        (True, {"lr": 1.0}, {"model.skip_temporal": True, "convert": ("temporal_blocks",)}),
        (True, {}, {"model.skip_temporal": True, "convert": None}),
    ],
    "model.adapt_16ch": [
        (False, {}, {"convert": None}),
        (True, {}, {"convert": ("in_channels",)}),
        (True, {"convert": ("pred_sigma",)}, {"convert": ("pred_sigma", "in_channels")}),
    ],
    "model.force_huggingface": [(True, {}, {})],
    "model.freeze_y_embedder": [
        (True, {}, {"freeze": ("y_embedder.*",)}),
        (False, {}, {"freeze": None}),
        (True, {"fps": 24}, {"freeze": None}),
    ],
    "model.only_train_temporal": [
        (True, {}, {"freeze": ("*", "!temporal_blocks.*")}),
        (True, {"fps": 24}, {}),
        (
            True,
            {"freeze": ("x_embedder.*",)},
            {"freeze": ("x_embedder.*", "*", "!temporal_blocks.*")},
        ),
    ],
    "model.freeze": [
        ("text", {}, {"freeze": ("y_embedder.*",)}),
        ("not_temporal", {}, {"freeze": ("*", "!*attn_temp.*")}),
        ("all", {}, "neither of ['text', 'not_temporal']"),
        ("text", {"fps": 24}, {}),
    ],
    "load": [("run", {"lr": 1.0}, {"load": "run"}), (None, {"lr": 1.0}, {"load": None})],
    "start_from_scratch": [(True, {}, {})],
    "model.from_pretrained": [
        ("a", {}, {"load": "a"}),
        ("a", {"load": None}, {"load": "a"}),
        ("a", {"load": "b"}, {"load": "b"}),
        ("a", {"fps": 24}, {"ckpt": "a"}),
        (None, {}, {"load": None}),
    ],
    "vae.type": [
        ("VideoAutoencoderPipeline", {}, "OpenSoraVAE_V1_2"),
        ("PatchPoolVAE", {}, {"vae.type": "PatchPoolVAE"}),
        (
            "OpenSoraVAE_V1_3",
            {"lr": 1.0},
            {"model.use_cond": True, "model.in_channels": 16, "score_style": None},
        ),
        ("OpenSoraVAE_V1_3", {"fps": 24, "dtype": "bf16"}, {"score_style": "words"}),
        ("OpenSoraVAE_V1_3", {}, {"model.use_cond": None}),
        ("OpenSoraVAE_V1_2", {"lr": 1.0}, {"model.use_cond": None}),
    ],
    "model.local_files_only": [(True, {}, {})],
    "vae.local_files_only": [(True, {}, {})],
    "text_encoder.local_files_only": [(True, {}, {})],
    "vae.cache_dir": [(None, {}, {}), ("/models", {}, "HF_HOME=FOLDER")],
    "text_encoder.cache_dir": [(None, {}, {}), ("/models", {}, "HF_HOME=FOLDER")],
    "vae.force_huggingface": [(True, {}, {})],
    "vae.freeze_vae_2d": [(True, {}, {})],
    "vae.cal_loss": [(True, {}, {})],
    "text_encoder.type": [
        ("clip", {}, "type='t5'"),
        ("classes", {}, "type='t5'"),
        ("t5", {}, {"text_encoder.type": "t5"}),
    ],
    "text_encoder.model_max_length": [
        (
            200,
            {},
            {
                "text_encoder.max_length": 200,
                "model.model_max_length": 200,
                "text_encoder.clean_captions": True,
            },
        )
    ],
    "text_encoder.shardformer": [
        (True, {}, {"text_encoder.dtype": "fp16"}),
        (False, {}, {"text_encoder.dtype": None}),
    ],
    "scheduler.type": [
        ("iddpm-speed", {}, {"scheduler.type": "iddpm"}),
        ("dpm-solver", {}, "num_sampling_steps=100"),
    ],
    **{
        f"{key}": [
            (value, {"fps": 24}, {f"scheduler.{key}": value}),
            (None, {"fps": 24}, {f"scheduler.{key}": None}),
        ]
        for key, value in {
            "image_cfg_scale": 5.0,
            "use_sdedit": True,
            "use_oscillation_guidance_for_text": True,
            "use_oscillation_guidance_for_image": False,
        }.items()
    },
    "scheduler.dynamic_thresholding": [
        (False, {}, {}),
        (True, {}, "no sampler of Open-Sora calls the function"),
    ],
    "scheduler.thresholding": [
        (False, {}, {}),
        (0.995, {}, "no sampler of Open-Sora calls the function"),
    ],
    "drop_condition": [
        ({"keep": 1}, {}, {"scheduler.drop_condition": {"keep": 1}}),
        (
            {"keep": 1},
            {"scheduler.drop_condition": {"text": 1}},
            {"scheduler.drop_condition": {"text": 1}},
        ),
    ],
    "use_cosine_scheduler": [(True, {}, {"lr_schedule": "cosine"}), (False, {}, {})],
    "accumulation_steps": [
        (4, {}, {"accumulation_steps": 4}),
        (None, {}, {"accumulation_steps": None}),
    ],
    "warmup": [(100, {}, {"warmup_steps": None})],
    "warmup_steps": [
        (None, {}, {}),
        (1001, {"lr": 1.0, "accumulation_steps": 4}, {"warmup_steps": 251}),
        (1001, {"lr": 1.0, "accumulation_steps": 1}, {"warmup_steps": 1001}),
        (1001, {"accumulation_steps": 4}, {"warmup_steps": 1001}),
    ],
    "ema_decay": [
        (None, {}, {}),
        (0.5, {"lr": 1.0, "accumulation_steps": 2}, {"ema_decay": 0.25}),
        (0.5, {"accumulation_steps": 2}, {"ema_decay": 0.5}),
    ],
    "lr": [(1e-4, {}, {"optimizer.lr": 1e-4}), (1e-4, {"optimizer.lr": 1.0}, "got both lr")],
    "adam_eps": [(1e-15, {}, {"optimizer.eps": 1e-15})],
    "weight_decay": [(0.1, {}, {"optimizer.weight_decay": 0.1})],
    **{key: [(None, {}, {})] for key in ("grad_clip", "epochs", "sp_size")},
    "prompt": [
        ("a fox", {"fps": 24}, {"prompts": ["a fox"]}),
        (["a"], {"fps": 24}, {"prompts": ["a"]}),
        (None, {"fps": 24}, {}),
    ],
    "reference_path": [
        (
            ["x.png", None],
            {"prompt": ["a", "b"]},
            {
                "prompts": [{"prompt": "a", "reference_path": "x.png"}, {"prompt": "b"}],
                "reference_path": None,
            },
        ),
        ("x.png", {"prompt": ["a"]}, {"reference_path": "x.png"}),
        (["x.png"], {"prompt": ["a", "b"]}, "one for each"),
    ],
    "mask_strategy": [
        (
            ["0", None],
            {"prompts": ["a", "b"]},
            {"prompts": [{"prompt": "a", "mask_strategy": "0"}, {"prompt": "b"}]},
        )
    ],
    "save_dir": [("out", {}, {"outputs": "out"})],
    "num_sample": [(3, {}, {"num_samples": 3})],
    "prompt_as_path": [(True, {}, {"skip_existing": True}), (False, {}, {"skip_existing": None})],
    "sample_name": [("x", {}, {})],
    "multi_resolution": [("STDiT2", {}, {})],
    "align": [(5, {}, {})],
    "verbose": [(2, {}, {})],
    "llm_refine": [(False, {}, {}), (True, {}, "no external service is used")],
    "watermark": [(False, {}, {}), (True, {}, "watermarks are not supported")],
    "start_index": [(0, {}, {}), (4, {}, "write only these prompts")],
    "end_index": [(4, {}, "write only these prompts")],
    "prompt_generator": [("", {}, {}), ("x", {}, "write the prompts into prompts")],
}
# Configs for models that are not here, each with more that would be refused.
OTHER_MODELS = {
    "DiT": """
num_frames = 1
image_size = (256, 256)
root = None
data_path = "CSV_PATH"
use_image_transform = True
dtype = "bf16"
plugin = "zero2"
model = dict(type="DiT-XL/2", no_temporal_pos_emb=True, enable_flashattn=True)
vae = dict(type="VideoAutoencoderKL", from_pretrained="stabilityai/sd-vae-ft-ema")
text_encoder = dict(
    type="clip", from_pretrained="openai/clip-vit-base-patch32", model_max_length=77
)
scheduler = dict(type="iddpm", timestep_respacing="")
batch_size = 128
lr = 1e-4
epochs = 1
""",
    "PixArt": """
num_frames = 1
fps = 1
image_size = (2560, 1536)
model = dict(type="PixArtMS-1B/2", space_scale=4, no_temporal_pos_emb=True, base_size=256)
vae = dict(type="VideoAutoencoderKL", from_pretrained="sdxlvae", subfolder="vae")
text_encoder = dict(type="t5", from_pretrained="t5", model_max_length=300)
scheduler = dict(type="dpm-solver", num_sampling_steps=14, cfg_scale=4.5)
dtype = "bf16"
prompt_path = "./t2i.txt"
save_dir = "./samples/"
""",
    "Latte": """
dataset = dict(type="VideoTextDataset", num_frames=16, frame_interval=3, image_size=(256, 256))
plugin = "zero2"
model = dict(type="Latte-XL/2", enable_flash_attn=True)
text_encoder = dict(type="clip", from_pretrained="openai/clip-vit-base-patch32")
lr = 2e-5
""",
    "autoencoders": """
dataset = dict(type="VideoTextDataset", num_frames=17, frame_interval=1, image_size=(256, 256))
model = dict(type="OpenSoraVAE_V1_2", freeze_vae_2d=True, from_pretrained=None, cal_loss=True)
perceptual_loss_weight = 0.1
mixed_strategy = "mixed_video_image"
lr = 1e-5
""",
}
