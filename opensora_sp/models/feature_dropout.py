"""Dropout of adapters (Lin et al., 2024, "LoRA Dropout"): columns of A are zeroed.

Models draw nothing: masks are set from outside, by numbers that do not depend on ranks.
"""

from __future__ import annotations

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
