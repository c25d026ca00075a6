"""How a training run ends: nothing left to do, asked to stop, or done; and what its last lines say."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from pathlib import Path

import psutil

from opensora_sp.checkpoint import newest_checkpoint
from opensora_sp.config import TrainConfig, dump_config
from opensora_sp.config.schema import Validation
from opensora_sp.features.build import TrainingSet, make_plan, with_length
from opensora_sp.runtime.processes import launchers

from .metrics import read_lines, read_metrics, told_time
from .validation import sampling_config

logger = logging.getLogger(__name__)
PATIENCE = (
    30.0  # seconds that torchrun gives its ranks after Ctrl-C or SIGTERM; a constant of torch 2.5
)
RESUME = "--resume"
SAMPLING = "sample.py"  # in a run's folder: a config to sample from it


def nothing_left(cfg: TrainConfig, checkpoint: Path | None, dataset: TrainingSet) -> str | None:
    """Why a run that resumes from ``checkpoint`` has no step to do; None where it has some."""
    if checkpoint is None:
        return None
    state = json.loads((checkpoint / "state.json").read_text())
    plan = make_plan(
        cfg, dataset, state["micro_batches_per_step"], num_samples=state.get("num_samples")
    )
    cfg = with_length(cfg, plan)
    if state["step"] < cfg.max_steps:
        return None
    key = "max_steps" if cfg.epochs is None else "epochs"
    return (
        f"nothing left to do: {checkpoint} is of step {state['step']}, and the run ends after step "
        f"{cfg.max_steps}; to train on, raise {key}"
    )


def command_to_resume() -> str:
    """The command that started this run, launcher included, with ``--resume auto``."""
    command = _command_of_launcher() or ["python", *sys.argv]
    kept = []
    skipped = False
    for part in command:
        if not skipped and part != RESUME and not part.startswith(f"{RESUME}="):
            kept.append(part)
        skipped = part == RESUME
    return shlex.join([*kept, RESUME, "auto"])


def _command_of_launcher() -> list[str]:
    """What the user typed to start ``torchrun`` or ``colossalai run``, without the paths of Python and of these."""
    found = launchers()
    if not found or found[-1] is None:
        return []
    try:
        parts = found[-1].cmdline()
    except psutil.Error:
        return []

    if len(parts) > 1 and Path(parts[0]).name.startswith("python"):
        program = Path(parts[1]).name
        return (
            [program, *parts[2:]]
            if program in ("torchrun", "colossalai")
            else ["python", *parts[1:]]
        )
    return parts


def short_patience(seconds_per_step: float, grace_time: float) -> str | None:
    """What to do where a step takes longer than the launcher waits after Ctrl-C; None where it does not.

    Args:
        grace_time: the config's, which ends a rank that was signalled alone.
    """
    if seconds_per_step < PATIENCE or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    is_too_short = seconds_per_step >= grace_time
    raising = f", and raise grace_time (now {grace_time:g} s)" if is_too_short else ""
    return (
        f"a step takes {seconds_per_step:.0f} s, and torchrun kills ranks {PATIENCE:.0f} s after Ctrl-C or SIGTERM, "
        f"without a checkpoint of that step; to stop with one, send SIGINT to this rank alone: kill -INT {os.getpid()}"
        f"{raising}"
    )


def conclude(cfg: TrainConfig, run_dir: Path, seconds: float) -> None:
    """The last lines of a run that is done: steps, time, last loss, checkpoint, and how to sample from it."""
    last = read_metrics(run_dir)[-1]
    loss = "no finite loss" if last["loss"] is None else f"last loss {last['loss']:.4f}"
    steps = f"{last['step']} of {cfg.max_steps} steps"
    logger.info("finished: %s | %s | %s%s", steps, told_time(seconds), loss, _heldout(run_dir))
    logger.info("checkpoint: %s", newest_checkpoint(run_dir))

    write_sampling_config(cfg, run_dir)
    command = [
        "python",
        "scripts/inference.py",
        str(run_dir / SAMPLING),
        "--ckpt",
        str(run_dir),
        "--prompt",
        "TEXT",
    ]
    logger.info("sample from it: %s", shlex.join(command))


def write_sampling_config(cfg: TrainConfig, run_dir: Path) -> None:
    """A config to sample from the run: its model, sizes and scheduler, and what its validation says of sampling."""
    looks = cfg.validation or Validation(every=1, prompts=["TEXT"])
    ours = {"prompts": [], "outputs": str(run_dir / "samples")}
    sampling = sampling_config(cfg, looks).model_copy(update=ours)
    (run_dir / SAMPLING).write_text(dump_config(sampling), encoding="utf-8")


def _heldout(run_dir: Path) -> str:
    """The newest held-out loss of a run, if it has one."""
    file = run_dir / "validation.jsonl"
    lines = read_lines(file) if file.is_file() else []
    return f" | held-out loss {lines[-1]['loss']:.4f} (step {lines[-1]['step']})" if lines else ""
