"""A run as a whole: first lines of its log, entry in ``sessions.jsonl``, ``summary.json``."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from opensora_sp.config import unused_settings
from opensora_sp.config.schedule import describe_schedule
from opensora_sp.encoders import planned_latent_size
from opensora_sp.parallel import CommLedger, Options
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.rank_groups import group_sizes
from opensora_sp.parallel.strategies import (
    SwitchRows,
    chunk_costs,
    fewest_rows,
    strategy_for,
    with_chunks,
)

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)


def log_setup(trainer: Trainer, run_dir: Path) -> None:
    """Log processes, model, micro-batches and the peak for MFU, with warnings about them."""
    cfg, mesh, plan = trainer.cfg, trainer.mesh, trainer.plan
    name = type(trainer.module).__name__
    millions = sum(p.numel() for p in trainer.module.parameters()) / 1e6
    processes = f"dp_size {mesh.dp_size} x sp_size {mesh.sp_size} processes"
    if not isinstance(cfg.sp_size, int):
        sizes = ", ".join(map(str, group_sizes(mesh.family)))
        processes = f"{mesh.world_size} processes in groups of {sizes}"
    logger.info("run folder %s", run_dir)
    logger.info("%s, %s", processes, trainer.device.type)
    logger.info("%s, %.1f M parameters, %s", name, millions, cfg.precision)
    if trainer.tensors.lora is not None:
        lora = trainer.tensors.lora
        trained = sum(p.numel() for p in trainer.tensors.shards.working.values())
        message = "LoRA of rank %d in %d layers: %.1f M trained parameters, on the weights of %s"
        logger.info(message, lora.rank, len(lora.layers), trained / 1e6, lora.base.name)

    unused = unused_settings(cfg, max(group_sizes(mesh.family)))
    for line in [*describe_schedule(cfg), *describe_exchanges(trainer), *unused]:
        logger.info("%s", line)

    if not cfg.schedules_groups and plan.micro_batches_per_step % mesh.dp_size:
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


def describe_exchanges(trainer: Trainer) -> list[str]:
    """Whether exchanges are sent in chunks, and why; nothing on one rank to a batch.

    Where a degree is chosen for each micro-batch, there is a line on chunks for each degree.
    """
    mesh, options = trainer.mesh, trainer.options
    if mesh.sp_size == 1:
        return []

    lines = list[str]()
    degrees = [size for size in group_sizes(mesh.family) if size > 1]
    for degree in degrees:
        where = f" on {degree} ranks" if len(degrees) > 1 else ""
        lines.append(f"exchanges in chunks{where}: {_describe_chunks(trainer, options, degree)}")
    return lines


def _describe_chunks(trainer: Trainer, options: Options, ranks: int) -> str:
    """The number of chunks for the largest batches on so many ranks, and what decides it."""
    cfg, mesh = trainer.cfg, trainer.mesh
    config: Any = trainer.module.config
    latent_size = planned_latent_size(cfg.vae, cfg.num_frames, *cfg.size)
    shape = BatchShape.of(config, cfg.batch_size, latent_size)
    # Groups of a fixed degree may span nodes that are larger than the degree.
    spans_nodes = mesh.spans_nodes if ranks == mesh.sp_size else ranks > mesh.ranks_per_node
    options = replace(options, spans_nodes=spans_nodes)
    strategy = strategy_for(shape, options, ranks)
    if strategy is not SwitchRows or not shape.alternates:
        return f"off: with the strategy {strategy.label!r}, no tokens switch between blocks"

    element_size = trainer.module.dtype.itemsize
    chosen = with_chunks(options, shape, ranks, element_size=element_size).num_chunks
    costs = chunk_costs(options, shape, ranks, element_size=element_size)
    setting = f"overlap_chunks={options.overlap_chunks!r}"
    most = max(1, fewest_rows(shape, ranks))
    limit = f", but {most} where a rank has no more rows" if most < chosen else ""
    return f"{'off' if chosen == 1 else chosen} ({setting}){limit}: {costs.describe()}"


def session_of(trainer: Trainer) -> dict[str, Any]:
    """What ``sessions.jsonl`` records of one attempt at a run, beside its steps."""
    on_cuda = trainer.device.type == "cuda"
    return {
        "model": trainer.cfg.model["type"],
        "parameters": sum(p.numel() for p in trainer.module.parameters()),
        "precision": trainer.cfg.precision,
        "dp_size": trainer.mesh.dp_size,
        "sp_size": trainer.cfg.sp_size,
        "device": torch.cuda.get_device_name(trainer.device) if on_cuda else "CPU",
        "peak_tflops": trainer.meter.peak.tflops,
    }


def write_summary(trainer: Trainer, run_dir: Path, counter: CommLedger) -> None:
    """Write ``summary.json``: what the ranks sent each other, and what was read. Rank 0 writes."""
    corrupt = trainer.corrupt.found
    switches = counter.calls["switch", "forward"]
    summary = {
        "dp_size": trainer.mesh.dp_size,
        "sp_size": trainer.cfg.sp_size,
        "switches": switches,
        "elements_sent": {" ".join(key): count for key, count in sorted(counter.elements.items())},
        "files_read": dict(trainer.corrupt.files_read),
        "broken_clips": corrupt,
        "sync_check": trainer.sync_check.cost,
    }
    logger.info("done: %d layout switches between the ranks of this replica", switches)
    if corrupt:
        logger.warning("%d clips could not be read and were substituted", len(corrupt))

    if dist.get_rank() == 0:
        text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        (run_dir / "summary.json").write_text(text, encoding="utf-8")
