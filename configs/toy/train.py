"""The training of the package's model ``toy``, ten minutes on one core; see ``make toy``."""

_base_ = ["../_base_/demo_model.py"]

seed = 42
sp_size = 1
precision = "fp32"
dataset = dict(type="CachedFeatures", path="data/toy_model/features")
batch_size = 32
max_steps = 3500
warmup_steps = 100
lr_schedule = "cosine"
optimizer = dict(lr=3e-3, betas=(0.9, 0.99))
grad_clip = 1.0
ema_decay = 0.998
log_every = 100
ckpt_every = 500
keep_last = 2
outputs = "outputs/toy"
