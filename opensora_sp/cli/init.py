"""``opensora-sp init``: a project folder with a config, clips, prompts and a run script."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opensora_sp.checkpoint.pretrained import check_vacant
from opensora_sp.common.files import SHIPPED, check_writable, shipped_name
from opensora_sp.config import TrainConfig, load_train_config
from opensora_sp.config.config_file import files_of
from opensora_sp.data.index import find_files, index_files, relative_entries
from opensora_sp.data.manifest import write_manifest
from opensora_sp.data.toy import toy_clip
from opensora_sp.data.video import write_video

FIRST = "configs/demo/first.py"
NUM_CLIPS = 16
SIZE, FPS = 72, 8.0  # pixels and frames per second of the toy clips
RUN = """\
#!/bin/sh
# Train on the clips of {manifest}, then sample the prompts of prompts.txt.
# Started again, it resumes the training. NPROC=N ./run.sh takes N processes, one for each GPU.
set -eu
cd "$(dirname "$0")"
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}"
nproc="${{NPROC:-{nproc}}}"

torchrun --standalone --nproc_per_node "$nproc" -m opensora_sp.cli train {config} --resume auto
torchrun --standalone --nproc_per_node "$nproc" -m opensora_sp.cli sample {outputs}/sample.py \\
    --ckpt {outputs} --prompts prompts.txt
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")
    config = (
        "training config of the package, which is copied with the configs that it is based on "
        f"(default: {FIRST}, a small model that trains on CPUs in a minute)"
    )
    parser.add_argument("--config", default=FIRST, help=config)
    return parser


def run(args: argparse.Namespace) -> None:
    """Write the project, and print what to do next."""
    config = _shipped_config(args.config)
    cfg = load_train_config(config)
    if cfg.dataset.manifest is None or cfg.bucket_config is not None:
        raise ValueError(
            f"got --config {args.config!r}, which needs a feature cache, or clips of many sizes; "
            f"expected a config of one size; choose another one, such as {FIRST}"
        )
    folder = args.folder
    check_vacant(folder)
    check_writable(folder, "the folder")

    name = _copy_configs(config, folder)
    family = config.relative_to(SHIPPED).parts[0]
    (folder / "prompts.txt").write_bytes((SHIPPED / family / "prompts.txt").read_bytes())
    _write_clips(cfg, folder / cfg.dataset.manifest)
    script = folder / "run.sh"
    nproc = cfg.sp_size if isinstance(cfg.sp_size, int) else 1
    names = dict(manifest=cfg.dataset.manifest, config=name, outputs=cfg.outputs, nproc=nproc)
    script.write_text(RUN.format(**names), encoding="utf-8")
    script.chmod(0o755)

    sys.stdout.write(
        f"{folder}: {name} and {NUM_CLIPS} toy clips in {cfg.dataset.manifest}\n"
        f"train and sample: {script.absolute()}\n"
        "your own clips, before it has run: opensora-sp index FOLDER -o "
        f"{folder / cfg.dataset.manifest}\n"
    )


def _shipped_config(name: str) -> Path:
    """The training config of the package with this name, ``configs/...``."""
    configs = sorted(SHIPPED.glob("*/train/*.py"))
    by_name = {FIRST: SHIPPED / "demo" / "first.py"}
    by_name |= {shipped_name(path): path for path in configs}
    if name not in by_name:
        raise ValueError(
            f"got --config {name!r}; expected a training config of the package; choose one of "
            f"{', '.join(by_name)}"
        )
    return by_name[name]


def _copy_configs(config: Path, folder: Path) -> str:
    """Copy a config and those that it is based on; returns its path in the project."""
    for path in files_of(config):
        copy = folder / shipped_name(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return shipped_name(config)


def _write_clips(cfg: TrainConfig, manifest: Path) -> None:
    """Write toy clips that fit a config, each with its caption, and their manifest."""
    # Of which every frame_interval-th is used.
    num_frames = (cfg.num_frames - 1) * cfg.dataset.frame_interval + 1
    clips = manifest.with_suffix("")
    clips.mkdir(parents=True)
    for number in range(NUM_CLIPS):
        clip = toy_clip(0, number)
        write_video(clips / f"{number:04d}.mp4", clip.draw(num_frames, SIZE), fps=FPS)
        (clips / f"{number:04d}.txt").write_text(clip.caption + "\n", encoding="utf-8")

    index = index_files(find_files(clips))
    assert not index.corrupt
    write_manifest(manifest, relative_entries(index.entries, manifest))
