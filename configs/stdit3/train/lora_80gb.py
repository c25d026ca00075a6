"""LoRA of the release 1.2 on clips of yours, on one GPU of 80 GB: 102 frames of 720p.

opensora-sp index videos/ -o data/clips.csv --captions captions.csv
hf download hpcai-tech/OpenSora-STDiT-v3 --local-dir weights/stdit-v3
python scripts/train.py configs/stdit3/train/lora_80gb.py
python scripts/inference.py configs/stdit3/inference/v12.py --ckpt weights/stdit-v3 \\
    --lora outputs/lora_80gb --prompt "..."
"""

_base_ = ["../../_base_/stdit3_v12.py", "../../_base_/train.py"]

load = "weights/stdit-v3"
lora = dict(rank=16, alpha=16)
num_frames = 102
resolution = "720p"
aspect_ratio = "9:16"
batch_size = 1
micro_batches_per_step = 4
dataset = dict(frame_interval=1)
optimizer = dict(lr=2e-4)
ema_decay = 0.99
warmup_steps = 100
max_steps = 2000
ckpt_every = 250
outputs = "outputs/lora_80gb"
