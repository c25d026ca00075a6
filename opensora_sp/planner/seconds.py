"""FLOPs of a model, and seconds of a micro-batch on the busiest rank, by arithmetic: quick enough
to schedule by.

FLOPs are the matrix products of layers and of attentions that depend on the size of a clip or its
text; embedding the timestep and sizes of a sample, norms and everything elementwise are left out
(together under a thousandth in STDiT3-XL). So are, in derived models, embedders of further inputs
and attention to them. Seconds follow from sizes, in plain torch, at the rates of ``CostModel``.

Legend: B samples, T frames, S patches of a frame, C hidden width, H heads, P ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opensora_sp.config.sections import Lora
from opensora_sp.models.base import ConditionedModel, PassCounts
from opensora_sp.models.layers import CrossAttention, PatchEmbed3D
from opensora_sp.models.stdit_config import SharedConfig
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CostModel, attention_flops, block_flops
from opensora_sp.parallel.options import Options
from opensora_sp.parallel.strategies import REPLICATED, Strategy, strategy_for

from .trace import meta_model

TEXT_ONLY = "kv_linear"  # the layer of a block that sees the text alone
TEXT_ATTENTION = "cross_attn"  # the attention of a block to the text
STEP = 3  # forward, and twice as much backward: gradients of inputs and of weights
FROZEN_STEP = 2  # without gradients of weights


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a forward pass for each token, each text token, and each pair of the two.

    ``frozen_per_token`` and ``frozen_per_text_token`` count layers that are not trained,
    ``forward_counts`` and ``backward_counts`` the rest of a pass.
    """

    config: SharedConfig
    per_token: float
    per_text_token: float
    per_pair: float
    frozen_per_token: float
    frozen_per_text_token: float
    forward_counts: PassCounts
    backward_counts: PassCounts

    @classmethod
    def planned(cls, name: str, config: Any, lora: Lora | None = None) -> ModelFlops:
        """Of a model's registered name and whole configuration, with its trained adapters."""
        return cls.of(meta_model(name, config, torch.bfloat16, lora))

    @classmethod
    def of(cls, model: ConditionedModel) -> ModelFlops:
        """Read a model's layers; on any device, "meta" included."""
        # Of trained and of frozen layers.
        tokens, text, pairs = [0.0, 0.0], [0.0, 0.0], 0.0
        for name, module in model.named_modules():
            parts = name.split(".")
            part, sees_text = parts[0], TEXT_ATTENTION in parts
            if isinstance(module, PatchEmbed3D) and part in model.token_parts:
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
                elif part in model.token_parts and TEXT_ONLY not in parts:
                    tokens[is_frozen] += products
        totals = sum(tokens), sum(text), pairs, tokens[1], text[1]
        return cls(model.config, *totals, *model.pass_counts)

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


# Single frames have no temporal attention: this share of operators and activations is left, and no
# queries and keys are projected, 4 C^2 of a token.
OF_IMAGES = 0.78
# Of a pair of blocks without the temporal one.
OF_SPATIAL_BLOCKS = 0.5
# Of an exchange of tokens: packed by the sender and placed by the receiver.
EXCHANGE_ACTIVATIONS, EXCHANGE_OPERATORS = 4, 3


def seconds_of(
    shape: BatchShape,
    options: Options,
    ranks: int,
    *,
    model: ModelFlops,
    element_size: int,
    recomputed: float = 0.0,
    training: bool = True,
) -> float:
    """Predict the seconds of a micro-batch on the busiest rank, without the optimizer's step.

    Forward, recomputation, backward and exchanges run one after the other. Captions count at full
    length.

    Args:
        options: of sequence parallelism; ``options.cost_model`` has the rates, and
            ``options.spans_nodes`` states whether the group lies on several nodes.
        element_size: bytes of an activation's number.
        recomputed: share of the blocks whose forward is repeated in backward.
        training: False predicts a forward pass alone.

    Raises:
        ValueError: if no strategy applies to the shape.
    """
    pass_of = _Pass(shape, options, ranks, model, element_size)
    forward = pass_of.compute(model.forward_counts) + pass_of.exchanges()
    if not training:
        return forward

    repeated = recomputed * pass_of.compute(model.forward_counts)
    if pass_of.strategy.resends(options):
        repeated += recomputed * pass_of.exchanges()
    backward = pass_of.compute(model.backward_counts, backward=True) + pass_of.exchanges()
    return forward + repeated + backward


class _Pass:
    """Seconds of the parts of one pass on the busiest rank."""

    def __init__(
        self, shape: BatchShape, options: Options, ranks: int, model: ModelFlops, element_size: int
    ) -> None:
        self.shape, self.options, self.ranks = shape, options, ranks
        self.model, self.element_size = model, element_size
        self.rates: CostModel = options.cost_model
        self.strategy: type[Strategy] = strategy_for(shape, options, ranks)

        # Blocks wait for the exchange before them, so each takes as long as on its busiest rank.
        layouts = shape.of_blocks(self.strategy.token_layouts(shape))
        self.tokens = sum(max(shape.entries(layout, ranks)) for layout in layouts) / len(layouts)

    def compute(self, counts: PassCounts, *, backward: bool = False) -> float:
        """Seconds of the operators of a forward pass, or of a backward pass."""
        seconds = self._products(backward) / self.rates.flops

        shape, share = self.shape, OF_IMAGES if self.are_images else 1.0
        if not shape.alternates:
            share = OF_SPATIAL_BLOCKS
        activations = share * shape.depth * counts.activations * self.tokens
        seconds += self.rates.elementwise(activations, shape.width, self.element_size)
        seconds += shape.depth * self._self_attention(backward) + self._cross_attention(backward)

        operators = share * shape.depth * counts.operators + counts.once
        return self.rates.with_launches(seconds, operators)

    @property
    def are_images(self) -> bool:
        """True if each temporal row is a single token, which gets its own value."""
        shape = self.shape
        is_frame = shape.frames == 1 and shape.windows is None and not shape.full
        return is_frame and shape.alternates

    def exchanges(self) -> float:
        """Seconds of the exchanges of one pass; 0 on one rank."""
        exchanges = self.strategy.exchanges(self.shape, self.options, self.element_size)
        if self.ranks == 1 or not exchanges:
            return 0.0

        calls = sum(getattr(exchange, "count", 1) for exchange in exchanges)
        sent = sum(exchange.estimate(self.shape, self.ranks) for exchange in exchanges)
        packed = EXCHANGE_ACTIVATIONS * sent / self.rates.memory_bandwidth
        operators = EXCHANGE_OPERATORS * calls
        return self.options.link.seconds(sent, calls) + self.rates.with_launches(packed, operators)

    def _products(self, backward: bool) -> float:
        """FLOPs of a forward pass outside of attention; of a backward pass of gradients of
        inputs and, in layers that are trained, of weights.
        """
        flops, passes = self.model, 2 if backward else 1
        per_token = passes * flops.per_token - backward * flops.frozen_per_token
        per_text_token = passes * flops.per_text_token - backward * flops.frozen_per_text_token
        if self.are_images:
            per_token -= passes * 4.0 * self.shape.width**2 * self.shape.depth

        # A rank projects the text of the samples of which it holds tokens.
        samples = -(-self.shape.num_samples // self.ranks)
        text = samples * flops.config.model_max_length
        return per_token * self.tokens + per_text_token * text

    def _self_attention(self, backward: bool) -> float:
        """Seconds of a spatial and a temporal attention."""
        layouts = self.strategy.attention_layouts(self.shape)
        parts = list(zip(layouts, attention_rows(self.shape), strict=False))
        if self.are_images:
            del parts[1]
        return sum(self._attention(layout, rows, backward) for layout, rows in parts)

    def _attention(self, layout: str, rows: dict[int, int], backward: bool) -> float:
        share = 1.0
        if layout != REPLICATED:
            entries = self.shape.entries(layout, self.ranks)
            share = max(entries) / sum(entries)

        heads = share * self.shape.num_samples * self.shape.heads
        width = self.shape.width // self.shape.heads
        return sum(
            self.rates.attention(heads * count, length, length, width, backward=backward)
            for length, count in rows.items()
        )

    def _cross_attention(self, backward: bool) -> float:
        """Seconds of all attention of tokens to text."""
        shape, layers = self.shape, self.model.per_pair / (4.0 * self.shape.width)
        queries = max(1, round(self.tokens / shape.num_samples))
        rows, width = layers * shape.num_samples * shape.heads, shape.width // shape.heads
        text = self.model.config.model_max_length
        return self.rates.attention(rows, queries, text, width, backward=backward)
