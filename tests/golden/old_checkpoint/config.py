num_frames = 5
image_size = (28, 24)
vae = dict(type="PatchPoolVAE", pool=(1, 4, 4))
text_encoder = dict(type="HashedBagOfWords", width=8, max_length=12)
model = dict(
    type="STDiT3",
    in_channels=3,
    caption_channels=8,
    model_max_length=12,
    hidden_size=12,
    depth=1,
    num_heads=3,
    mlp_ratio=2.0,
    pred_sigma=False,
    class_dropout_prob=0.2,
    drop_path=0.2,
)
sp_size = 2
precision = "fp32"
dataset = dict(manifest="toys/clips.csv")
outputs = "run"
batch_size = 3
micro_batches_per_step = 2
max_steps = 4
warmup_steps = 2
optimizer = dict(lr=1e-3)
grad_clip = 1.0
grad_checkpoint = True
ckpt_every = 2
log_every = 1
