"""Trackers: TensorBoard and Weights & Biases, with the same methods.

They show what a run's folder has in files: hyperparameters, metrics and, in W&B, videos. Steps
are optimizer steps, counted from 1. A run that resumes replaces what an attempt before has tracked
of the steps that it repeats.
"""

from __future__ import annotations

import json
import os
import textwrap
import uuid
from pathlib import Path
from typing import Any, TypeAlias, cast

from opensora_sp.checkpoint.filesystem import FileSystem
from opensora_sp.common.files import read_small_file
from opensora_sp.common.importing import check_extra, is_installed
from opensora_sp.config import TrainConfig

# Of W&B, unless WANDB_PROJECT names another.
PROJECT = "opensora_sp"


def check_trackers(cfg: TrainConfig) -> None:
    """Raise ValueError if a tracker is configured and not installed."""
    for key in ("tensorboard", "wandb"):
        if getattr(cfg, key) is True:
            instead = f"set {key}=False (metrics.jsonl holds the same numbers)"
            check_extra(key, key, setting=f"{key}=True", instead=instead)


def wants_tensorboard(cfg: TrainConfig) -> bool:
    """Whether a run writes TensorBoard's files."""
    return is_installed("tensorboard") if cfg.tensorboard == "auto" else cfg.tensorboard


class TensorBoardTracker:
    """TensorBoard's files, in ``tensorboard`` of the run's folder.

    Args:
        hyperparameters: nested as in a config.
        start: steps done; what former attempts have tracked of later steps is hidden.
    """

    def __init__(self, run_dir: Path, hyperparameters: dict[str, Any], *, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run_dir / "tensorboard")
        self._writer = cast(Any, SummaryWriter(folder, purge_step=start + 1))
        # An indented block is shown as it is.
        text = json.dumps(hyperparameters, indent=1)
        self._writer.add_text("config", textwrap.indent(text, " " * 4))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add the numbers of a step, by their names in ``metrics.jsonl``."""
        for name, number in values.items():
            self._writer.add_scalar(name, number, step)
        # A run that fails would lose what is buffered.
        self._writer.flush()

    def video(self, step: int, name: str, file: Path, fps: float) -> None:
        """TensorBoard has no videos. They are in the run's folder, and the studio shows them."""

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """One W&B run for all attempts of a training run: its id is kept in the run's folder.

    Numbers are logged by optimizer step, so steps that a resumed run repeats overwrite the former
    ones. Whether and where W&B sends them depends on its own settings (``WANDB_MODE``,
    ``WANDB_PROJECT``, ``wandb login``).
    """

    def __init__(self, run_dir: Path, hyperparameters: dict[str, Any]) -> None:
        import wandb

        # An id that is kept lets a resumed run continue the same curves.
        kept = run_dir / "wandb_id"
        if not kept.is_file():
            FileSystem().write_file(kept, uuid.uuid4().hex.encode())
        self._wandb: Any = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.name,
            dir=str(run_dir),
            id=read_small_file(kept, 1 << 10, "the id of a run of W&B").decode(),
            resume="allow",
            config=hyperparameters,
        )
        # W&B's own step must grow, but a resumed run repeats steps.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def video(self, step: int, name: str, file: Path, fps: float) -> None:
        suffix = file.suffix.removeprefix(".")
        if suffix == "png":
            media = self._wandb.Image(str(file))
        else:
            media = self._wandb.Video(str(file), format=suffix)
        self._run.log({"step": step, name: media})

    def close(self) -> None:
        self._run.finish()


Tracker: TypeAlias = TensorBoardTracker | WandbTracker
