"""As 16x256x256_sp2.py, from precomputed features: loads no autoencoder and no text encoder.

torchrun --nproc_per_node 8 scripts/precompute.py \\
    configs/stdit3/train/16x256x256_sp2.py -o cache/16x256x256
"""

_base_ = ["16x256x256_sp2.py"]

dataset = dict(type="CachedFeatures", path="cache/16x256x256", manifest=None)
outputs = "outputs/stdit3_16x256x256_cached"
