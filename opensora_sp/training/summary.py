"""A run as a whole: first lines of its log, entry in ``sessions.jsonl``, ``summary.json``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from opensora_sp.parallel import CommLedger

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)


def log_setup(trainer: Trainer, run_dir: Path) -> None:
    """Log processes, model, micro-batches and the peak for MFU, with warnings about them."""
    cfg, mesh, plan = trainer.cfg, trainer.mesh, trainer.plan
    name = type(trainer.module).__name__
    millions = sum(p.numel() for p in trainer.module.parameters()) / 1e6
    processes = f"dp_size {mesh.dp_size} x sp_size {mesh.sp_size} processes"
    logger.info("run folder %s", run_dir)
    logger.info("%s, %s", processes, trainer.device.type)
    logger.info("%s, %.1f M parameters, %s", name, millions, cfg.precision)

    if plan.micro_batches_per_step % mesh.dp_size:
        logger.warning(
            "%d micro-batches per step on %d replicas: some wait while others compute their last "
            "one",
            plan.micro_batches_per_step,
            mesh.dp_size,
        )
    logger.info("%s", trainer.meter.peak)
    for line in plan.describe(trainer.start):
        logger.info("%s", line)
    if not any(trainer.dataset.rows.texts):
        logger.warning(
            "none of the %d clips has a caption, so the model learns nothing of text; make the "
            "manifest with opensora-sp index --captions FILE",
            len(trainer.dataset),
        )


def session_of(trainer: Trainer) -> dict[str, Any]:
    """What ``sessions.jsonl`` records of one attempt at a run, beside its steps."""
    on_cuda = trainer.device.type == "cuda"
    return {
        "model": trainer.cfg.model["type"],
        "parameters": sum(p.numel() for p in trainer.module.parameters()),
        "precision": trainer.cfg.precision,
        "dp_size": trainer.mesh.dp_size,
        "sp_size": trainer.mesh.sp_size,
        "device": torch.cuda.get_device_name(trainer.device) if on_cuda else "CPU",
        "peak_tflops": trainer.meter.peak.tflops,
    }


def write_summary(trainer: Trainer, run_dir: Path, counter: CommLedger) -> None:
    """Write ``summary.json``: what the ranks sent each other, and what was read. Rank 0 writes."""
    corrupt = trainer.corrupt.found
    switches = counter.calls["switch", "forward"]
    summary = {
        "dp_size": trainer.mesh.dp_size,
        "sp_size": trainer.mesh.sp_size,
        "switches": switches,
        "elements_sent": {" ".join(key): count for key, count in sorted(counter.elements.items())},
        "files_read": dict(trainer.corrupt.files_read),
        "broken_clips": corrupt,
        "sync_check": trainer.sync_check.cost,
    }
    if dist.get_rank() == 0:
        text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        (run_dir / "summary.json").write_text(text, encoding="utf-8")

    logger.info("done: %d layout switches between the ranks of this replica", switches)
    if corrupt:
        logger.warning("%d clips could not be read and were substituted", len(corrupt))
