"""Trainings of several world sizes, one after the other, in the same processes."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import torch.distributed as dist

from opensora_sp.config import load_train_config
from opensora_sp.parallel import shutdown_process_group
from opensora_sp.training.metrics import log_to
from opensora_sp.training.preflight import preflight
from opensora_sp.training.trainer import Trainer


def train_in_worlds(config: Path, runs: list[tuple[int, list[str], str | None]]) -> None:
    """One run after the other on the first so many of these processes, as ``train`` does it."""
    from opensora_sp.plugin import current_device

    rank = dist.get_rank()
    # A store's file may outlast its run: a second one of that name would read old addresses.
    token = [uuid.uuid4().hex]
    dist.broadcast_object_list(token)
    shutdown_process_group()
    for number, (world_size, options, resume) in enumerate(runs):
        if rank >= world_size:
            continue
        os.environ["WORLD_SIZE"] = str(world_size)
        cfg = load_train_config(config, options)
        store = f"file://{cfg.outputs}.{token[0]}.{number}"
        dist.init_process_group("gloo", store, rank=rank, world_size=world_size)
        dataset, checkpoint = preflight(cfg, resume)
        dist.barrier()
        folder = Path(cfg.outputs)
        folder.mkdir(exist_ok=True)
        log_to(folder, enabled=rank == 0)
        Trainer(cfg, dataset, checkpoint, current_device()).train(folder)
        shutdown_process_group()


def digests(run_dir: Path, step: int) -> dict[str, str]:
    """SHA-256 of weights, average and optimizer state after a step."""
    files = json.loads((run_dir / f"step_{step:08d}" / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}
