"""A run as a whole: first and last lines of its log, ``sessions.jsonl``, ``summary.json``, and the
config and the command to sample from it.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from opensora_sp.checkpoint import find_weights
from opensora_sp.checkpoint.paths import newest_checkpoint
from opensora_sp.config import InferenceConfig, TrainConfig, dump_config
from opensora_sp.config.common import Common
from opensora_sp.config.sections import Validation
from opensora_sp.data.manifest import Manifest
from opensora_sp.data.sampler import BatchPlan
from opensora_sp.features.build import TrainingSet
from opensora_sp.features.corrupt_samples import CorruptSamples
from opensora_sp.parallel import CommLedger, SequenceMesh
from opensora_sp.parallel.rank_groups import group_sizes

from .checkpointing import TrainingState
from .metrics import read_validations
from .trainable import describe_schedule

logger = logging.getLogger(__name__)
# In a run's folder: a config to sample from it.
SAMPLING = "sample.py"


@dataclass(frozen=True)
class RunSetup:
    """The parts of a run that its summary describes."""

    cfg: TrainConfig
    mesh: SequenceMesh
    tensors: TrainingState
    dataset: TrainingSet
    plan: BatchPlan

    @property
    def device(self) -> torch.device:
        return next(self.tensors.module.parameters()).device

    def session(self) -> dict[str, Any]:
        """The entry of ``sessions.jsonl`` for one attempt at the run, without its steps."""
        on_cuda = self.device.type == "cuda"
        return {
            "model": self.cfg.model["type"],
            "parameters": sum(p.numel() for p in self.tensors.module.parameters()),
            "precision": self.cfg.precision,
            "dp_size": self.mesh.dp_size,
            "sp_size": self.cfg.sp_size,
            "device": torch.cuda.get_device_name(self.device) if on_cuda else "CPU",
        }


def log_setup(run: RunSetup, run_dir: Path, start: int) -> None:
    """Log processes, model and micro-batches, with warnings about them.

    Args:
        start: steps that the run has done before.
    """
    cfg, mesh, plan, module = run.cfg, run.mesh, run.plan, run.tensors.module
    processes = f"dp_size {mesh.dp_size} x sp_size {mesh.sp_size} processes"
    if not isinstance(cfg.sp_size, int):
        sizes = ", ".join(map(str, group_sizes(mesh.family)))
        processes = f"{mesh.world_size} processes in groups of {sizes}"
    logger.info("run folder %s", run_dir)
    logger.info("%s, %s", processes, run.device.type)
    millions = sum(p.numel() for p in module.parameters()) / 1e6
    logger.info("%s, %.1f M parameters, %s", type(module).__name__, millions, cfg.precision)
    lora = run.tensors.lora
    if lora is not None:
        trained = sum(p.numel() for p in run.tensors.shards.working.values())
        message = "LoRA of rank %d in %d layers: %.1f M trained parameters, on the weights of %s"
        logger.info(message, lora.settings.rank, len(lora.layers), trained / 1e6, lora.base.name)

    for line in [*describe_schedule(cfg), *plan.describe(start)]:
        logger.info("%s", line)
    if not any(run.dataset.rows.texts):
        logger.warning(
            "none of the %d clips has a caption, so the model learns nothing of text; make the "
            "manifest with opensora-sp index --captions FILE",
            len(run.dataset),
        )


def write_sampling_config(cfg: TrainConfig, run_dir: Path, clips: Manifest) -> None:
    """Write a config to sample from the run, with the sampling options of its validation.

    Without validation, videos have the frame rate of the median clip, if the manifest has any.
    """
    update: dict[str, Any] = {"prompts": [], "outputs": str(run_dir / "samples")}
    validation = cfg.validation
    if validation is None:
        validation = Validation(every=1, prompts=["TEXT"])
        rates = clips.column("fps")
        rates = rates[rates > 0]  # NaN where unknown, and of images
        if len(rates) > 0:
            update["fps"] = float(np.median(rates)) / cfg.dataset.frame_interval

    sampling = sampling_config(cfg, validation).model_copy(update=update)
    (run_dir / SAMPLING).write_text(dump_config(sampling), encoding="utf-8")


def sampling_config(cfg: TrainConfig, validation: Validation) -> InferenceConfig:
    """A config for sampling, with model, sizes, scheduler and validation of a training config."""
    common = {name: getattr(cfg, name) for name in Common.model_fields}
    del common["sp_size"]

    names = ("prompts", "negative_prompt", "num_samples", "fps", "batch_size", "format", "use_ema")
    sampling = {name: getattr(validation, name) for name in names}
    for name in ("num_sampling_steps", "cfg_scale"):
        option = getattr(validation, name)
        if option is not None:
            common["scheduler"] = common["scheduler"] | {name: option}
    return InferenceConfig(**common, **sampling, precision=cfg.precision)


def write_summary(
    run: RunSetup, run_dir: Path, counter: CommLedger, corrupt: CorruptSamples
) -> None:
    """Write ``summary.json``: what the ranks sent each other, and what was read. Rank 0 writes."""
    summary = {
        "dp_size": run.mesh.dp_size,
        "sp_size": run.cfg.sp_size,
        "switches": counter.calls["switch", "forward"],
        "elements_sent": {" ".join(key): count for key, count in sorted(counter.elements.items())},
        "files_read": dict(corrupt.files_read),
        "broken_clips": corrupt.found,
    }
    if corrupt.found:
        logger.warning("%d clips could not be read and were substituted", len(corrupt.found))

    if dist.get_rank() == 0:
        text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        (run_dir / "summary.json").write_text(text, encoding="utf-8")


def conclude(cfg: TrainConfig, run_dir: Path, last_loss: float | None, seconds: float) -> None:
    """Log the end of a finished run: steps, time, last loss, checkpoint, how to sample from it.

    Args:
        last_loss: None if no step since the line of the log before was finite.
    """
    loss = "no finite loss" if last_loss is None else f"last loss {last_loss:.4f}"
    steps = f"{cfg.max_steps} of {cfg.max_steps} steps"
    heldout = ""
    for line in read_validations(run_dir)[-1:]:
        heldout = f" | held-out loss {line['loss']:.4f} (step {line['step']})"
    took = timedelta(seconds=round(seconds))
    logger.info("finished: %s | %s | %s%s", steps, took, loss, heldout)
    logger.info("checkpoint: %s", newest_checkpoint(run_dir))

    weights = ["--ckpt", str(run_dir)]
    if cfg.lora is not None:
        assert cfg.load is not None
        # Of a run, training has loaded the trained weights, sampling would load their average.
        base = find_weights(cfg.load, allow_pickle=cfg.allow_pickle)
        weights = ["--ckpt", str(base), "--lora", str(run_dir)]
    command = ["opensora-sp", "sample", str(run_dir / SAMPLING), *weights, "--prompt", "TEXT"]
    logger.info("sample from it: %s", _from_anywhere(command))


def _from_anywhere(command: list[str]) -> str:
    """A command for a shell whose folder may be another one, as after ``my_project/run.sh``.

    Its paths, and paths in configs, are relative to the working directory of this process.
    """
    return f"cd {shlex.quote(os.getcwd())} && {shlex.join(command)}"
