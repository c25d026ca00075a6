"""What a model has to compute, whoever shares it: matrix products of its layers and of its attentions, by arithmetic.

Counted are those that depend on the size of a clip or its text; embedding the timestep and sizes of a sample, norms and
everything elementwise are left out (together under a thousandth in STDiT3-XL).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.config import SharedConfig
from opensora_sp.models.layers import CrossAttention, PatchEmbed3D

from .sharing import Shape, attention_work

TOKENS = (
    "x_embedder",
    "blocks",
    "spatial_blocks",
    "temporal_blocks",
    "final_layer",
)  # see all tokens of a clip
TEXT_ONLY = "kv_linear"  # of a block's layers, the one that sees the text instead
STEP = 3  # forward, and backward twice as much: gradients of what goes in and of the weights


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a forward pass: so many for each token, for each text token, and for each pair of the two."""

    config: SharedConfig
    per_token: float
    per_text_token: float
    per_pair: float

    @classmethod
    def of(cls, model: ConditionedModel) -> ModelFlops:
        """Read a model's layers; on any device, "meta" included."""
        tokens = text = pairs = 0.0
        for name, module in model.named_modules():
            part = name.partition(".")[0]
            if isinstance(module, PatchEmbed3D) and part in TOKENS:
                tokens += 2.0 * math.prod(module.proj.weight.shape)
            elif isinstance(module, CrossAttention):
                pairs += 4.0 * module.q_linear.out_features
            elif isinstance(module, nn.Linear):
                products = 2.0 * module.in_features * module.out_features
                if part == "y_embedder" or name.endswith(TEXT_ONLY):
                    text += products
                elif part in TOKENS:
                    tokens += products
        return cls(model.config, tokens, text, pairs)

    def forward(self, latents: tuple[int, ...], text_tokens: float) -> float:
        """Of a batch of latents ``(B, c, frames, height, width)`` whose captions have ``text_tokens`` together."""
        num_samples, _, frames, height, width = latents
        shape = Shape.of(self.config, num_samples, (frames, height, width))
        alone = self.per_token * shape.tokens + self.config.depth * attention_work(shape)
        return (
            text_tokens * (self.per_text_token + self.per_pair * shape.tokens / num_samples) + alone
        )

    def step(self, latents: tuple[int, ...], text_tokens: float) -> float:
        """Of forward and backward, what checkpointing recomputes not counted."""
        return STEP * self.forward(latents, text_tokens)
