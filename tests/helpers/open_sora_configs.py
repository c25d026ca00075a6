"""Configs in the manner of Open-Sora, and what becomes of keys whose values
are computed."""

from __future__ import annotations

from typing import Any

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
OPEN_SORA = {"lr": 1.0}  # a key that only its configs have
# Keys whose value is computed or depends on others: the value, the rest of the config, and the
# values expected here (None: no such key any more). An error is expected where there is a text.
CASES: list[tuple[str, Any, dict[str, Any], dict[str, Any] | str]] = [
    ("data_path", "a.csv", {}, {"dataset.manifest": "a.csv", "dataset.clip_start": "random"}),
    ("frame_interval", 3, {"fps": 24}, {"save_fps": 8.0}),
    ("frame_interval", 3, {"fps": 24, "save_fps": 12}, {"save_fps": 12}),
    ("frame_interval", 0, {"fps": 24}, "expected a value of Open-Sora's"),
    ("batch_size", 10, BUCKETED, {"batch_size": None}),
    ("dataset.image_size", (8, 9), BUCKETED, {"image_size": None}),
    ("dataset.image_size", (8, 9), {}, {"image_size": (8, 9)}),
    ("dataset.transform_name", "flip", {}, "expected one of ['center'"),
    (
        "dataset.type",
        "VariableVideoTextDataset",
        {"dataset.clip_start": "middle"},
        {"dataset.type": "VariableVideoText", "dataset.clip_start": "middle"},
    ),
    (
        "bucket_config",
        {"360p": {113: (None, 6)}},
        OPEN_SORA,
        {"bucket_config": {"360p": {113: (1.0, 6)}}, "epochs": 1000},
    ),
    (
        "bucket_config",
        {"360p": {113: (None, 6)}},
        {},
        {"bucket_config": {"360p": {113: (None, 6)}}, "epochs": None},
    ),
    (
        "mask_ratios",
        {"mask_head": 0.5, "intepolate": 0.1},
        {},
        {"mask_ratios": {"quarter_head": 0.5, "intepolate": 0.1}},
    ),
    ("dtype", "fp32", {"vae.type": "Mine"}, {"precision": "fp32", "vae.dtype": None}),
    ("plugin", "zero2-seq", {"ema_decay": 0.9}, {"zero_stage": 2, "ema_decay": 0.9}),
    ("plugin", "ddp", {}, "expected one of ['zero1', 'zero2', 'zero2-seq']"),
    ("model.qk_norm", True, {"model.type": "STDiT2-XL/2"}, {"model.qk_norm_legacy": None}),
    ("model.enable_flash_attn", False, {}, {"model.attention": "sdpa"}),
    ("model.kernel_size", (8, 8, -1), {}, {"model.use_cond": None}),
    ("model.skip_temporal", True, {}, {"model.skip_temporal": True, "convert": None}),
    (
        "model.adapt_16ch",
        True,
        {"convert": ("pred_sigma",)},
        {"convert": ("pred_sigma", "in_channels")},
    ),
    ("model.freeze_y_embedder", True, {"fps": 24}, {"freeze": None}),
    (
        "model.only_train_temporal",
        True,
        {"freeze": ("x_embedder.*",)},
        {"freeze": ("x_embedder.*", "*", "!temporal_blocks.*")},
    ),
    ("model.from_pretrained", "a", {"load": None}, {"load": "a"}),
    ("model.from_pretrained", "a", {"load": "b"}, {"load": "b"}),
    ("vae.type", "OpenSoraVAE_V1_3", {"fps": 24, "dtype": "bf16"}, {"score_style": "words"}),
    ("vae.type", "OpenSoraVAE_V1_3", {}, {"model.use_cond": None}),
    ("text_encoder.shardformer", False, {}, {"text_encoder.dtype": None}),
    ("use_cosine_scheduler", True, {}, {"lr_schedule": "cosine"}),
    ("warmup_steps", 1001, {**OPEN_SORA, "accumulation_steps": 4}, {"warmup_steps": 251}),
    ("warmup_steps", 1001, {"accumulation_steps": 4}, {"warmup_steps": 1001}),
    ("ema_decay", 0.5, {"accumulation_steps": 2}, {"ema_decay": 0.5}),
    ("lr", 1e-4, {"optimizer.lr": 1.0}, "got both lr"),
    (
        "reference_path",
        ["x.png", None],
        {"prompt": ["a", "b"]},
        {
            "prompts": [{"prompt": "a", "reference_path": "x.png"}, {"prompt": "b"}],
            "reference_path": None,
        },
    ),
    ("reference_path", ["x.png"], {"prompt": ["a", "b"]}, "one for each"),
    ("prompt_as_path", True, {"fps": 24}, {"skip_existing": True}),
    ("llm_refine", False, {"fps": 24}, {}),
    ("multi_resolution", "STDiT2", {"fps": 24}, {}),
]
