"""A run that trains LoRA adapters: the weights that they are for, and what checkpoints say of them.

Checkpoints hold the adapters alone. So ``load`` names the weights at every start, also where a run
resumes, and has to name the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from opensora_sp.checkpoint import Weights, fitted, load_model, on_rank_0, open_adapters
from opensora_sp.checkpoint.adapters import Base, adapter_files, base_digest
from opensora_sp.config import TrainConfig
from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.lora import base_names, lora_layers


@dataclass(frozen=True)
class LoraRun:
    """The adapters of a run.

    Attributes:
        layers: names of the adapted layers.
        base: the weights that they are trained on.
    """

    layers: list[str]
    rank: int
    alpha: float
    base: Base

    def files(self) -> dict[str, bytes]:
        """The JSON files beside the adapters, by name."""
        return adapter_files(self.layers, rank=self.rank, alpha=self.alpha, base=self.base)


def load_base(cfg: TrainConfig, weights: Weights, module: ConditionedModel) -> LoraRun:
    """Copy the weights of ``load`` into a boosted model with adapters. Collective.

    Args:
        weights: as they were opened.
        module: the bare model with its adapters.
    """
    assert cfg.lora is not None and cfg.load is not None
    with torch.device("meta"):
        bare = cfg.model_spec.build()
    weights = fitted(weights, bare, convert=cfg.convert)

    layers = list(lora_layers(module))
    sha256 = [""]
    with on_rank_0("reading the weights of load") as is_rank_0:
        if is_rank_0:
            sha256 = [base_digest(weights, layers)]
    dist.broadcast_object_list(sha256, src=0)

    renamed = base_names(module.state_dict())
    load_model(weights.renamed(renamed), module, None)
    return LoraRun(layers, cfg.lora.rank, cfg.lora.alpha, Base(cfg.load, sha256[0]))


def check_base(run: LoraRun, checkpoint: Path) -> None:
    """Raise ValueError if a checkpoint's adapters were trained on other weights than ``load``."""
    there = open_adapters(str(checkpoint / "model")).base
    if there is not None and there.sha256 != run.base.sha256:
        raise ValueError(
            f"got load {run.base.name!r} to resume from {checkpoint}, whose adapters are for other "
            f"weights ({there.name!r} when it was written); expected the same; change load back, "
            "or start a new run with another --cfg-options outputs=..."
        )
