"""How a training run ends: nothing left to do, and what its last lines say."""

from __future__ import annotations

import json
from pathlib import Path

from opensora_sp.config import TrainConfig

from .clips import TrainingSet, make_plan, with_length


def nothing_left(cfg: TrainConfig, checkpoint: Path | None, dataset: TrainingSet) -> str | None:
    """Why a run that resumes from ``checkpoint`` has no step to do; None where it has some."""
    if checkpoint is None:
        return None
    state = json.loads((checkpoint / "state.json").read_text())
    cfg = with_length(cfg, make_plan(cfg, dataset, state["micro_batches_per_step"]))
    if state["step"] < cfg.max_steps:
        return None
    key = "max_steps" if cfg.epochs is None else "epochs"
    return (
        f"nothing left to do: {checkpoint} is of step {state['step']}, and the run ends after step "
        f"{cfg.max_steps}; to train on, raise {key}"
    )
