"""Step time of a training run that encodes its clips, against one from a feature cache.

OMP_NUM_THREADS=1 python -m benchmarks feature_cache

Both have the same clips, model and losses. The autoencoder has the architecture of Stable
Diffusion's with random weights and a quarter of its width. Captions take no time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
CLIPS = 12
CONFIG = """
num_frames = 16
image_size = (64, 64)
precision = "fp32"
dataset = dict(manifest="{folder}/clips.csv")
vae = dict(type="VideoAutoencoderKL", from_pretrained="{folder}/vae")
text_encoder = dict(type="HashedBagOfWords", width=64, max_length=24)
model = dict(
    type="STDiT3", in_channels=4, caption_channels=64, model_max_length=24, hidden_size=144,
    depth=4, num_heads=4,
)
batch_size = 2
max_steps = {steps}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_set(folder)
        config = folder / "train.py"
        config.write_text(CONFIG.format(folder=folder, steps=args.steps))
        run_script("scripts/precompute.py", config, "-o", folder / "cache")
        from_cache = ["dataset.type=CachedFeatures", f"dataset.path={folder / 'cache'}"]

        ratios = []
        for number in range(args.rounds):
            encoding, losses = train(config, folder / f"encoding {number}")
            cached, same = train(config, folder / f"cached {number}", *from_cache)
            apart = max(abs(a - b) / a for a, b in zip(losses, same, strict=True))
            print(
                f"{encoding:.3f} s a step encoding, {cached:.3f} s from the cache; losses "
                f"{apart:.0e} apart"
            )
            ratios.append(encoding / cached)

    print(f"ratio: median {median(ratios):.1f} of {', '.join(f'{ratio:.1f}' for ratio in ratios)}")
    return {"ratio": median(ratios), "ratios": ratios}


def write_set(folder: Path) -> None:
    from diffusers import AutoencoderKL

    run_script("scripts/make_toy_clips.py", folder, "--num", CLIPS, "--num-frames", 16)
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(32, 64, 128, 128),
        layers_per_block=2,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    ).save_pretrained(folder / "vae")


def train(config: Path, outputs: Path, *options: str) -> tuple[float, list[float]]:
    """The median step time after the first steps, and all losses."""
    run_script("scripts/train.py", config, "--cfg-options", f"outputs={outputs}", *options)
    lines = [json.loads(line) for line in (outputs / "metrics.jsonl").read_text().splitlines()]
    return median(line["step_time"] for line in lines[2:]), [line["loss"] for line in lines]


def run_script(script: str, *arguments: object) -> None:
    command = [sys.executable, ROOT / script, *arguments]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
