"""Videos of 16 frames, 256x256, on any number of GPUs."""

_base_ = ["../../_base_/stdit3_xl2.py"]

num_frames = 16
image_size = (256, 256)
fps = 8
batch_size = 4
scheduler = dict(num_sampling_steps=30, cfg_scale=7.0)
outputs = "samples/16x256x256"
