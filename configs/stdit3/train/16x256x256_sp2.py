"""16 frames of 256x256; every clip is shared by 2 GPUs.

Predicted with Triton kernels, without the encoders:
    8 x H100: 23.8 GB, 0.11 s a step, MFU 38%
    8 x H200: 23.8 GB, 0.10 s a step, MFU 41%
"""

_base_ = ["../../_base_/stdit3_xl2.py", "../../_base_/train.py"]

num_frames = 16
image_size = (256, 256)
sp_size = 2
batch_size = 3
outputs = "outputs/stdit3_16x256x256"
