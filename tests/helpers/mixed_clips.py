"""Images and videos of several sizes and lengths, and a training config with buckets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from runs import CONFIG

from opensora_sp.data.manifest import Entry, write_manifest
from opensora_sp.data.video import write_video

BUCKETS = {
    "144p": {1: (1.0, 3), 3: (1.0, 2), 6: ((0.9, 0.7), 2)},
    "256": {1: (0.5, 2), 3: (0.5, 1)},
}


TRAIN = (
    CONFIG.replace("num_frames = 5\nimage_size = (28, 24)\n", "").replace(
        "(1, 4, 4)", "(1, 16, 16)"
    )
    + """
bucket_config = {buckets!r}
dataset = dict(
    type="VariableVideoText", manifest={manifest!r},
    transform="resize_random_crop", clip_start="random",
)
precision = "fp32"
micro_batches_per_step = 3
max_steps = {steps}
optimizer = dict(lr=1e-3)
mask_ratios = dict(image_head=0.3, random=0.3)
grad_checkpoint = True
ckpt_every = 100
"""
)


SIZES = [(144, 256), (200, 200), (288, 256), (256, 144)]


LENGTHS = [1, 5, 9]


def write_mixed_set(folder: Path, broken: tuple[int, ...] = (3, 13)) -> Path:
    """24 clips: images and videos of two lengths in four sizes; some files are broken."""
    rng = np.random.default_rng(0)
    entries = []
    for number in range(24):
        (height, width), frames = SIZES[number % 4], LENGTHS[number % 3]
        video = np.repeat(
            rng.integers(0, 255, (frames, height // 8, width // 8, 3), dtype=np.uint8), 8, axis=1
        )
        video = np.repeat(video, 8, axis=2)

        path = folder / f"{number}.{'png' if frames == 1 else 'mp4'}"
        if frames == 1:
            Image.fromarray(video[0]).save(path)
        else:
            write_video(path, video, fps=8)

        if number in broken:
            path.write_bytes(b"broken")
        entries.append(Entry(Path(path.name), f"clip {number}", frames, height, width, 8.0))
    write_manifest(folder / "clips.jsonl", entries)
    return folder / "clips.jsonl"
