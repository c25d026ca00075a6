"""An exponential moving average of the weights, kept in shards."""

from __future__ import annotations

import torch
from torch import Tensor


class ShardedEma:
    """Average of the fp32 master shards; each rank keeps the part of the weights that ZeRO gives it.

    The decay grows with the step, ``min(decay, (1 + step) / (10 + step))``, so that the first steps are forgotten.
    """

    def __init__(self, masters: dict[str, Tensor], decay: float) -> None:
        self.masters, self.decay = masters, decay
        self.shards = {name: master.detach().clone() for name, master in masters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.shards.values()), list(self.masters.values()), 1 - decay)
