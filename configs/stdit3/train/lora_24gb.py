"""LoRA of the release 1.2 on clips of yours, on one GPU of 24 GB: 51 frames of 480p.

The encoders do not fit beside it, so features are precomputed:

opensora-sp index videos/ -o data/clips.csv --captions captions.csv
hf download hpcai-tech/OpenSora-STDiT-v3 --local-dir weights/stdit-v3
python scripts/precompute.py configs/stdit3/train/lora_80gb.py -o cache/lora \\
    --cfg-options resolution=480p num_frames=51 max_steps=2000
python scripts/train.py configs/stdit3/train/lora_24gb.py
"""

_base_ = ["lora_80gb.py"]

dataset = dict(type="CachedFeatures", path="cache/lora", manifest=None)
num_frames = 51
resolution = "480p"
outputs = "outputs/lora_24gb"
