"""Trainings of several world sizes, one after the other, in the same processes."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from worlds import in_worlds

from opensora_sp.config import load_train_config
from opensora_sp.training.metrics import log_to
from opensora_sp.training.preflight import preflight
from opensora_sp.training.trainer import Trainer


def train_in_worlds(config: Path, runs: list[tuple[int, list[str], str | None]]) -> None:
    """One run after the other on the first so many of these processes, as ``train`` does it."""
    in_worlds(train_once, [(world, (config, options, resume)) for world, options, resume in runs])


def train_once(config: Path, options: list[str], resume: str | None) -> None:
    """Train in the world of this process."""
    from opensora_sp.plugin import current_device

    cfg = load_train_config(config, options)
    dataset, checkpoint = preflight(cfg, resume)
    dist.barrier()
    folder = Path(cfg.outputs)
    folder.mkdir(exist_ok=True)
    log_to(folder, enabled=dist.get_rank() == 0)
    Trainer(cfg, dataset, checkpoint, current_device()).train(folder)


def digests(run_dir: Path, step: int) -> dict[str, str]:
    """SHA-256 of weights, average and optimizer state after a step."""
    files = json.loads((run_dir / f"step_{step:08d}" / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}
