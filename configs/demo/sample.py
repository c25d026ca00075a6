"""Samples of the demo's model."""

_base_ = ["../_base_/demo_model.py"]

precision = "fp32"
fps = 8
scheduler = dict(num_sampling_steps=30, cfg_scale=4.0)
batch_size = 4
outputs = "outputs/demo/samples"
