"""Sampling with this model: ``opensora-sp sample toy --prompt TEXT``."""

_base_ = ["../../configs/demo/sample.py"]

outputs = "samples"
