"""How the STDiT3 configs train, unless they say otherwise."""

seed = 42
precision = "bf16"
zero_stage = 2
dataset = dict(manifest="data/clips.csv", frame_interval=3)
num_workers = 4
grad_checkpoint = "auto"
grad_clip = 1.0
ema_decay = 0.9999
optimizer = dict(lr=1e-4)
warmup_steps = 1000
max_steps = 100_000
log_every = 10
ckpt_every = 1000
keep_last = 5
