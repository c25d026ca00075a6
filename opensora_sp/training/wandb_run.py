"""Weights & Biases, for configs with ``wandb=True``."""

from __future__ import annotations

import importlib.util
import os
import uuid
from pathlib import Path
from typing import Any

from opensora_sp.checkpoint import FileSystem

# Unless WANDB_PROJECT names another.
PROJECT = "opensora_sp"


def check_wandb(wanted: bool) -> None:
    """Raise ValueError if W&B is configured and not installed."""
    if wanted and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "got wandb=True, and no package of that name; expected it to be installed; "
            "pip install wandb, or set wandb=False (TensorBoard and metrics.jsonl hold the same "
            "numbers)"
        )


class WandbRun:
    """One W&B run for all attempts of a training run: its id is kept in the run's folder.

    Numbers are logged by optimizer step, so steps that a resumed run repeats overwrite the former
    ones. Whether and where W&B sends them depends on its own settings (``WANDB_MODE``,
    ``WANDB_PROJECT``, ``wandb login``).
    """

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        import wandb

        kept = run_dir / "wandb_id"
        if not kept.is_file():
            FileSystem().write_file(kept, uuid.uuid4().hex.encode())
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.name,
            dir=str(run_dir),
            id=kept.read_text(),
            resume="allow",
            config=config,
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
