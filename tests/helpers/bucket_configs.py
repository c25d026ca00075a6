"""A small model whose clips fall into buckets, as a config that needs no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONFIG = """
vae = dict(type="PatchPoolVAE", pool=(1, 8, 8))
text_encoder = dict(type="HashedBagOfWords", width=8, max_length=12)
model = dict(
    type="STDiT3", in_channels=3, caption_channels=8, model_max_length=12,
    hidden_size=48, depth=2, num_heads=3,
)
dataset = dict(type="VariableVideoText", manifest="none.csv")
max_steps = 1
"""
# Images and clips of one size, and clips of another.
FEW = {"144p": {1: (1.0, 16), 8: (1.0, 6)}, "240p": {8: (0.6, 2)}}


def write_bucket_config(folder: Path, buckets: dict[str, Any], **values: object) -> Path:
    """Write ``config.py`` with these buckets and further values; returns its path."""
    values = dict(bucket_config=buckets, **values)
    lines = [f"{name} = {value!r}\n" for name, value in values.items()]
    path = folder / "config.py"
    path.write_text(CONFIG + "".join(lines))
    return path
