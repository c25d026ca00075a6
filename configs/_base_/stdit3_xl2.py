"""STDiT3-XL/2 (1.2 B parameters) on latents of the Stable Diffusion VAE, with T5-XXL text.

``from_pretrained`` takes a hub name or a local folder.
"""

vae = dict(
    type="VideoAutoencoderKL",
    from_pretrained="stabilityai/sd-vae-ft-ema",
    micro_batch_size=8,
    dtype="bf16",
)
text_encoder = dict(
    type="t5", from_pretrained="DeepFloyd/t5-v1_1-xxl", max_length=300, dtype="bf16"
)
model = dict(type="STDiT3-XL/2", qk_norm=True, class_dropout_prob=0.1)
scheduler = dict(type="rflow", use_timestep_transform=True)
