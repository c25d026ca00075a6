"""The end of a training run: nothing left to do, asked to stop, or done."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from opensora_sp.checkpoint import find_weights, newest_checkpoint
from opensora_sp.common.files import read_json
from opensora_sp.config import TrainConfig, dump_config
from opensora_sp.config.sections import Validation
from opensora_sp.data import Manifest
from opensora_sp.features.build import TrainingSet, make_plan, with_length
from opensora_sp.runtime.processes import launchers

from .batch_sizes import recorded
from .metrics import format_time, read_lines
from .validation import sampling_config

logger = logging.getLogger(__name__)
# Seconds that torchrun gives its ranks after Ctrl-C or SIGTERM; a constant of torch.
LAUNCHER_GRACE_TIME = 30.0
RESUME, ACCEPT_NEW_DATA = "--resume", "--accept-new-data"
# In a run's folder: a config to sample from it.
SAMPLING = "sample.py"


def nothing_left(cfg: TrainConfig, checkpoint: Path | None, dataset: TrainingSet) -> str | None:
    """Why a run that resumes from ``checkpoint`` has no step left; None where it has some."""
    if checkpoint is None:
        return None

    cfg, state = recorded(cfg, checkpoint), read_json(checkpoint / "state.json")
    plan = make_plan(cfg, dataset, state["micro_batches_per_step"])
    cfg = with_length(cfg, plan)
    if state["step"] < cfg.max_steps:
        return None
    key = "max_steps" if cfg.epochs is None else "epochs"
    return (
        f"nothing left to do: {checkpoint} is of step {state['step']}, and the run ends after "
        f"step {cfg.max_steps}; to train longer, raise {key}"
    )


def command_to_resume() -> str:
    """The command that started this run, launcher included, with ``--resume auto``.

    It can be pasted in any folder. What the run has accepted as new data is that of its own
    checkpoints.
    """
    command = _command_of_launcher() or _own_command()
    kept = []
    is_value = False
    for part in command:
        if (
            not is_value
            and part not in (RESUME, ACCEPT_NEW_DATA)
            and not part.startswith(f"{RESUME}=")
        ):
            kept.append(part)
        is_value = part == RESUME
    return _from_anywhere([*kept, RESUME, "auto"])


def _from_anywhere(command: list[str]) -> str:
    """A command for a shell whose folder may be another one, as after ``my_project/run.sh``.

    Its paths, and those in configs, are relative to the working directory of this process. One
    that has been removed cannot be entered.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        return shlex.join(command)
    return f"{shlex.join(['cd', folder])} && {shlex.join(command)}"


def _command_of_launcher() -> list[str]:
    """The command line of ``torchrun`` or ``colossalai run``, without their and Python's paths."""
    found = launchers()
    if not found or found[-1] is None:
        return []
    try:
        parts: list[str] = found[-1].cmdline()
    except psutil.Error:
        return []

    if len(parts) > 1 and Path(parts[0]).name.startswith("python"):
        program = Path(parts[1]).name
        if program in ("torchrun", "colossalai"):
            return [program, *parts[2:]]
        return ["python", *parts[1:]]
    return parts


def _own_command() -> list[str]:
    """The command line of this process, without a launcher."""
    program, *arguments = sys.argv
    if Path(program).name == "opensora-sp":
        return ["opensora-sp", *arguments]
    if Path(program).parts[-2:] == ("cli", "__main__.py"):
        return ["python", "-m", "opensora_sp.cli", *arguments]
    return ["python", *sys.argv]


def advice_for_long_steps(seconds_per_step: float, grace_time: float) -> str | None:
    """How to stop a run whose steps take longer than the launcher waits; None for shorter steps.

    A run ends with the step after the one in which it was asked to stop, at the latest.

    Args:
        grace_time: of the config; a rank that was signalled alone has so many seconds to end.
    """
    seconds = 2 * seconds_per_step
    if seconds < LAUNCHER_GRACE_TIME or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    is_too_short = seconds >= grace_time
    raising = f", and raise grace_time (now {grace_time:g} s)" if is_too_short else ""
    return (
        f"two steps take {seconds:.0f} s, and torchrun kills ranks {LAUNCHER_GRACE_TIME:.0f} s "
        "after Ctrl-C or SIGTERM, without a checkpoint of these steps; "
        "to stop with one, send SIGINT to this rank alone: "
        f"kill -INT {os.getpid()}{raising}"
    )


def conclude(cfg: TrainConfig, run_dir: Path, last_loss: float | None, seconds: float) -> None:
    """Log the end of a finished run: steps, time, last loss, checkpoint, how to sample from it.

    Args:
        last_loss: None if no step since the line of the log before was finite.
    """
    loss = "no finite loss" if last_loss is None else f"last loss {last_loss:.4f}"
    steps = f"{cfg.max_steps} of {cfg.max_steps} steps"
    logger.info("finished: %s | %s | %s%s", steps, format_time(seconds), loss, _heldout(run_dir))
    logger.info("checkpoint: %s", newest_checkpoint(run_dir))

    script = ["opensora-sp", "sample", str(run_dir / SAMPLING)]
    weights = ["--ckpt", str(run_dir)]
    if cfg.lora is not None:
        assert cfg.load is not None
        # Of a run, training has loaded the trained weights, sampling would load their average.
        weights = [
            "--ckpt",
            str(find_weights(cfg.load, allow_pickle=cfg.allow_pickle)),
            "--lora",
            str(run_dir),
        ]
    command = [*script, *weights, "--prompt", "TEXT"]
    logger.info("sample from it: %s", _from_anywhere(command))


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


def _heldout(run_dir: Path) -> str:
    """The newest held-out loss of a run, if it has one."""
    lines = read_lines(run_dir / "validation.jsonl")
    return f" | held-out loss {lines[-1]['loss']:.4f} (step {lines[-1]['step']})" if lines else ""
