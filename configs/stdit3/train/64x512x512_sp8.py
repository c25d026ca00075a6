"""64 frames of 512x512, 65,536 tokens; every clip is shared by the 8 GPUs of a node."""

_base_ = ["../../_base_/stdit3_xl2.py", "../../_base_/train.py"]

num_frames = 64
image_size = (512, 512)
sp_size = 8
batch_size = 1
outputs = "outputs/stdit3_64x512x512"
