"""FLOPs of a model: matrix products of its layers and of its attentions, by arithmetic.

Counted are those that depend on the size of a clip or its text; embedding the timestep and sizes of
a sample, norms and everything elementwise are left out (together under a thousandth in STDiT3-XL).
So are, in derived models, embedders of further inputs and attention to them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from torch import nn

from opensora_sp.models.base import ConditionedModel
from opensora_sp.models.config import SharedConfig
from opensora_sp.models.embedders import PatchEmbed3D
from opensora_sp.models.layers import CrossAttention
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import attention_flops, block_flops

# Parts of a model whose layers see all tokens of a clip; of a block's, one sees the text instead.
TOKENS = ("x_embedder", "blocks", "spatial_blocks", "temporal_blocks", "final_layer")
TEXT_ONLY = "kv_linear"
TEXT_ATTENTION = "cross_attn"  # the attention of a block to the text
STEP = 3  # forward, and twice as much backward: gradients of inputs and of weights
FROZEN_STEP = 2  # without gradients of weights


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a forward pass for each token, each text token, and each pair of the two.

    ``frozen_per_token`` and ``frozen_per_text_token`` count layers that are not trained.
    """

    config: SharedConfig
    per_token: float
    per_text_token: float
    per_pair: float
    frozen_per_token: float = 0.0
    frozen_per_text_token: float = 0.0

    @classmethod
    def of(cls, model: ConditionedModel) -> ModelFlops:
        """Read a model's layers; on any device, "meta" included."""
        # Of trained and of frozen layers.
        tokens, text, pairs = [0.0, 0.0], [0.0, 0.0], 0.0
        for name, module in model.named_modules():
            parts = name.split(".")
            part, sees_text = parts[0], TEXT_ATTENTION in parts
            if isinstance(module, PatchEmbed3D) and part in TOKENS:
                weight = module.proj.weight
                tokens[not weight.requires_grad] += 2.0 * math.prod(weight.shape)
            elif isinstance(module, CrossAttention) and sees_text:
                pairs += 4.0 * module.q_linear.out_features
            elif isinstance(module, nn.Linear):
                is_frozen = not module.weight.requires_grad
                products = 2.0 * module.in_features * module.out_features
                # An adapted layer has its own and its adapter's below it.
                if part == "y_embedder" or (TEXT_ONLY in parts and sees_text):
                    text[is_frozen] += products
                elif part in TOKENS and TEXT_ONLY not in parts:
                    tokens[is_frozen] += products
        return cls(model.config, sum(tokens), sum(text), pairs, tokens[1], text[1])

    def forward(self, latents: tuple[int, ...], text_tokens: float) -> float:
        """FLOPs of a forward pass.

        Args:
            latents: shape ``(B, c, frames, height, width)`` of the batch.
            text_tokens: of all its captions together.
        """
        num_samples, _, frames, height, width = latents
        shape = BatchShape.of(self.config, num_samples, (frames, height, width))
        alone = self.per_token * shape.tokens + shape.depth * attention_work(shape)
        per_text_token = self.per_text_token + self.per_pair * shape.tokens / num_samples
        return text_tokens * per_text_token + alone

    def step(self, latents: tuple[int, ...], text_tokens: float) -> float:
        """FLOPs of forward and backward, without recomputation."""
        num_samples, _, frames, height, width = latents
        shape = BatchShape.of(self.config, num_samples, (frames, height, width))
        frozen = self.frozen_per_token * shape.tokens + self.frozen_per_text_token * text_tokens
        return STEP * self.forward(latents, text_tokens) - (STEP - FROZEN_STEP) * frozen


def attention_rows(shape: BatchShape) -> list[dict[int, int]]:
    """For spatial and temporal attention, the number of a sample's rows of each length."""
    T, S = shape.frames, shape.patches
    spatial: dict[int, int] = {S: T}
    temporal: dict[int, int] = {T: S}
    if shape.full:
        spatial = temporal = {T * S: 1}
    elif shape.windows is not None:
        temporal = Counter(size * T for size in shape.windows.sizes)
    return list(shape.of_blocks((spatial, temporal)))


def attention_work(shape: BatchShape) -> float:
    """FLOPs of the attentions of a pair of blocks, forward, for the whole batch."""
    samples, width = shape.num_samples, shape.width
    return sum(
        attention_flops(samples * count, length, width)
        for rows in attention_rows(shape)
        for length, count in rows.items()
    )


def blocks_work(shape: BatchShape) -> float:
    """FLOPs of a forward pass through all blocks, without attention to text."""
    tokens = len(attention_rows(shape)) * block_flops(shape.tokens, shape.width)
    return shape.depth * (attention_work(shape) + tokens)
