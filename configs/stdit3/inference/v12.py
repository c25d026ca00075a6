"""Videos of 51 frames in 480p with the release 1.2 and, with --lora, adapters of yours."""

_base_ = ["../../_base_/stdit3_v12.py"]

num_frames = 51
resolution = "480p"
aspect_ratio = "9:16"
fps = 24
batch_size = 1
scheduler = dict(num_sampling_steps=30, cfg_scale=7.0)
outputs = "samples/v12"
