"""EMA weights: an exponential moving average of the weights, in shards."""

from __future__ import annotations

import torch
from torch import Tensor

from opensora_sp.config.learning_rate import ema_decay


class ShardedEma:
    """Average of the fp32 master weights; each rank keeps the shards that ZeRO assigns to it.

    It begins at the weights of its creation.

    Args:
        master_weights: this rank's shards, by parameter.
        decay: of a step, in [0, 1).
        warmup: let the decay grow with the step, ``min(decay, (1 + step) / (10 + step))``, so that
            the first steps are forgotten. Open-Sora's releases do not.

    Attributes:
        shards: the average, by parameter. Shards that are views of one buffer have averages that
            are views of one buffer, and are averaged by one kernel.
    """

    def __init__(
        self, master_weights: dict[str, Tensor], decay: float, *, warmup: bool = True
    ) -> None:
        self.decay, self.warmup = decay, warmup
        self.shards: dict[str, Tensor] = {}
        # Buffers of master weights, by their identity, with the averages.
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

        for name, shard in master_weights.items():
            buffer = shard if shard._base is None else shard._base
            if id(buffer) not in self._buffers:
                self._buffers[id(buffer)] = buffer, buffer.detach().clone()
            average = self._buffers[id(buffer)][1]
            place = int(shard.storage_offset()) - int(buffer.storage_offset())
            # As many views as shards, so that checkpoints name them, of few buffers.
            self.shards[name] = average.as_strided(shard.shape, shard.stride(), place)

    @torch.no_grad()
    def update(self, step: int, taken: Tensor) -> None:
        """Average in the weights after optimizer step ``step``, counted from 0.

        Args:
            taken: whether the step was taken, a boolean ``[]`` on the device of the weights. A step
                that was skipped leaves the average as it is. The host does not wait for it.
        """
        weight = (1 - ema_decay(self.decay, step, warmup=self.warmup)) * taken
        for buffer, average in self._buffers.values():
            average.lerp_(buffer, weight.to(average.dtype))
