"""Buckets of resolutions and lengths as in stage 1 of Open-Sora 1.2; 8 GPUs share each batch.

Batch sizes are similar to the release's, which runs each batch on one GPU. ``opensora-sp plan``
estimates their memory. ``opensora-sp index`` writes a manifest with sizes.
"""

_base_ = ["../../_base_/stdit3_xl2.py", "../../_base_/train.py"]

vae = dict(
    _delete_=True,
    type="OpenSoraVAE_V1_2",
    from_pretrained="hpcai-tech/OpenSora-VAE-v1.2",
    micro_frame_size=17,
    micro_batch_size=4,
    dtype="bf16",
)
dataset = dict(
    type="VariableVideoText", frame_interval=1, transform="resize_center_crop", clip_start="random"
)
bucket_config = {
    "144p": {
        1: (1.0, 475),
        51: (1.0, 51),
        102: ((1.0, 0.33), 27),
        204: ((1.0, 0.1), 13),
        408: ((1.0, 0.1), 6),
    },
    "256": {
        1: (0.4, 297),
        51: (0.5, 20),
        102: ((0.5, 0.33), 10),
        204: ((0.5, 0.1), 5),
        408: ((0.5, 0.1), 2),
    },
    "240p": {
        1: (0.3, 297),
        51: (0.4, 20),
        102: ((0.4, 0.33), 10),
        204: ((0.4, 0.1), 5),
        408: ((0.4, 0.1), 2),
    },
    "360p": {
        1: (0.2, 141),
        51: (0.15, 8),
        102: ((0.15, 0.33), 4),
        204: ((0.15, 0.1), 2),
        408: ((0.15, 0.1), 1),
    },
    "512": {1: (0.1, 141)},
    "480p": {1: (0.1, 89)},
    "720p": {1: (0.05, 36)},
    "1024": {1: (0.05, 36)},
    "1080p": {1: (0.1, 5)},
    "2048": {1: (0.1, 5)},
}
scheduler = dict(type="rflow", use_timestep_transform=True, sample_method="logit-normal")
mask_ratios = dict(
    random=0.05,
    interpolate=0.005,
    quarter_random=0.005,
    quarter_head=0.005,
    quarter_tail=0.005,
    quarter_head_tail=0.005,
    image_random=0.025,
    image_head=0.05,
    image_tail=0.025,
    image_head_tail=0.025,
)
sp_size = 8
optimizer = dict(eps=1e-15)
ema_decay = 0.99
ckpt_every = 200
outputs = "outputs/stdit3_buckets_stage1"
