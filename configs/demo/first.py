"""A first training in about a minute on two CPU cores: the demo's model, few steps.

``opensora-sp init`` writes a project with it, and with clips for it.
"""

_base_ = ["../_base_/demo_model.py"]

sp_size = 2
precision = "fp32"
dataset = dict(manifest="data/clips.csv")
batch_size = 3  # not a multiple of sp_size, so that ranks exchange tokens
max_steps = 60
warmup_steps = 10
optimizer = dict(lr=2e-3, betas=(0.9, 0.99))
grad_clip = 1.0
log_every = 10
ckpt_every = 30
keep_last = 2
outputs = "outputs/first"
