"""16 frames of 256x256; every clip is shared by 2 GPUs."""

_base_ = ["../../_base_/stdit3_xl2.py", "../../_base_/train.py"]

num_frames = 16
image_size = (256, 256)
sp_size = 2
batch_size = 3
outputs = "outputs/stdit3_16x256x256"
