"""A model small enough for two CPU cores, with stand-ins for the VAE and the text encoder."""

num_frames = 8
image_size = (72, 72)
vae = dict(type="PatchDCTVAE", pool=(2, 24, 24), coefficients=3)
text_encoder = dict(type="HashedBagOfWords", width=64, max_length=24)
model = dict(
    type="STDiT3",
    in_channels=27,
    patch_size=(1, 1, 1),
    caption_channels=64,
    model_max_length=24,
    hidden_size=128,
    depth=2,
    num_heads=4,
    input_sq_size=72,
    pred_sigma=False,
)
# The shift towards noise, where the layout of a clip is decided. The default for such small frames
# shifts timesteps towards data.
scheduler = dict(type="rflow", use_timestep_transform=True, transform_scale=10.0)
