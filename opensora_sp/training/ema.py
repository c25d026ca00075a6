"""EMA weights: an exponential moving average of the weights, in shards."""

from __future__ import annotations

import torch
from torch import Tensor


class ShardedEma:
    """Average of the fp32 master weights; each rank keeps the shards that ZeRO assigns to it.

    The decay grows with the step, ``min(decay, (1 + step) / (10 + step))``, so that the first steps
    are forgotten.

    Args:
        master_weights: this rank's shards, by parameter.
        decay: of a step, in [0, 1).
    """

    def __init__(self, master_weights: dict[str, Tensor], decay: float) -> None:
        self.master_weights, self.decay = master_weights, decay
        self.shards = {name: shard.detach().clone() for name, shard in master_weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Average in the weights after optimizer step ``step``, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        shards, weights = list(self.shards.values()), list(self.master_weights.values())
        torch._foreach_lerp_(shards, weights, 1 - decay)
