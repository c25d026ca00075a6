"""Dropout of adapters (Lin et al., 2024, "LoRA Dropout"): columns of A are zeroed.

Models draw nothing: masks are set from outside, by numbers that do not depend on ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FeatureDropout(nn.Module):
    """Dropout of an adapter's input features, the same ones for all tokens of a micro-batch.

    It draws nothing: ``kept`` is set before each micro-batch, so ranks that share one drop the same
    features, also where blocks are recomputed.

    Args:
        features: width of the input.
        rate: probability of a feature to be dropped.

    Attributes:
        kept: ``[features]``, 0 for dropped features and 1 / (1 - rate) for others; None drops none.
    """

    def __init__(self, features: int, rate: float) -> None:
        super().__init__()
        self.features, self.rate = features, rate
        # No buffer: these are cast, saved, and compared between ranks.
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., features]`` -> the same shape, in training."""
        return x if self.kept is None or not self.training else x * self.kept


class AdapterDropout:
    """The dropout layers of a model's adapters.

    Attributes:
        size: numbers that a micro-batch takes, one for each input feature of each layer.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = model.modules()
        self.layers = [module for module in modules if isinstance(module, FeatureDropout)]
        self.size = sum(layer.features for layer in self.layers)

    def drop(self, drawn: Tensor, like: Tensor) -> None:
        """Set the features that the next micro-batch keeps.

        Args:
            drawn: uniform numbers in [0, 1), float32 ``[size]``.
            like: a tensor of the dtype and device of the adapters' weights.
        """
        parts = drawn.split([layer.features for layer in self.layers])
        kept = [part.ge(layer.rate) / (1 - layer.rate) for part, layer in zip(parts, self.layers)]
        on_device = torch.cat(kept).to(like)
        for layer, part in zip(self.layers, on_device.split([len(part) for part in parts])):
            layer.kept = part
