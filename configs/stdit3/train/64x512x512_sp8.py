"""64 frames of 512x512, 65,536 tokens; every clip is shared by the 8 GPUs of a node.

Predicted with Triton kernels, without the encoders:
    8 x H100: 29.5 GB, 0.16 s a step, MFU 36%
    8 x H200: 29.5 GB, 0.15 s a step, MFU 39%
"""

_base_ = ["../../_base_/stdit3_xl2.py", "../../_base_/train.py"]

num_frames = 64
image_size = (512, 512)
sp_size = 8
batch_size = 1
outputs = "outputs/stdit3_64x512x512"
