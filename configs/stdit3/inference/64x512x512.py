"""Videos of 64 frames, 512x512, on any number of GPUs."""

_base_ = ["../../_base_/stdit3_xl2.py"]

num_frames = 64
image_size = (512, 512)
fps = 8
batch_size = 1
scheduler = dict(num_sampling_steps=30, cfg_scale=7.0)
outputs = "samples/64x512x512"
