"""The demo: learns moving coloured shapes in minutes, on two CPU ranks that share each batch."""

_base_ = ["../_base_/demo_model.py"]

sp_size = 2
precision = "fp32"
dataset = dict(manifest="data/toy/clips.csv", cache=True)
batch_size = 39  # not a multiple of sp_size: nothing has to divide
max_steps = 1500
warmup_steps = 50
lr_schedule = "cosine"
optimizer = dict(lr=4e-3, betas=(0.9, 0.99))
grad_clip = 1.0
ema_decay = 0.99
log_every = 20
ckpt_every = 500
keep_last = 2
outputs = "outputs/demo"
validation = dict(
    every=500,
    prompts=[
        "a red triangle moving up on a blue background",
        "a green square moving right on a yellow background",
    ],
    num_sampling_steps=30,
    cfg_scale=2.0,
    fps=8,
    batch_size=16,
)
