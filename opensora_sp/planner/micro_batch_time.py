"""Seconds of a micro-batch on the busiest rank of a group, by arithmetic: quick enough to schedule
by.

A model's work follows from its sizes, in plain torch, and takes the rates of ``CostModel``.

Legend: B samples, T frames, S patches of a frame, C hidden width, H heads, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opensora_sp.config.sections import Lora
from opensora_sp.parallel import Options
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.strategies import REPLICATED, Strategy, strategy_for

from .flops import ModelFlops, attention_rows
from .trace import meta_model


@dataclass(frozen=True)
class PassCounts:
    """Work of one pass besides products and attention.

    Attributes:
        activations: ``[tokens, C]`` that elementwise kernels of a pair of blocks read and write.
        operators: of a pair of blocks.
        once: operators of embedders, the final layer and the loss.
    """

    activations: float
    operators: float
    once: float


# Forward and backward in plain torch, as counted on meta tensors. Schedules depend on them, and so
# not on the kernels of a machine.
PASSES = {
    "STDiT": (PassCounts(23, 27, 60), PassCounts(116, 102, 64)),
    "STDiT2": (PassCounts(44, 36, 140), PassCounts(146, 110, 140)),
    "STDiT3": (PassCounts(83, 80, 95), PassCounts(297, 170, 95)),
}
# Single frames have no temporal attention: this share of operators and activations is left, and no
# queries and keys are projected, 4 C^2 of a token.
OF_IMAGES = 0.78
# Of a pair of blocks without the temporal one.
OF_SPATIAL_BLOCKS = 0.5
# Of an exchange of tokens: packed by the sender and placed by the receiver.
EXCHANGE_ACTIVATIONS, EXCHANGE_OPERATORS = 4, 3


@dataclass(frozen=True)
class ModelCosts:
    """A model's work: products for each token, and the rest of its passes."""

    flops: ModelFlops
    text_length: int
    forward: PassCounts
    backward: PassCounts

    @classmethod
    def of(cls, name: str, config: Any, lora: Lora | None = None) -> ModelCosts:
        """Of a model's registered name and its whole configuration, with the adapters that are
        trained; one without counts takes the counts of STDiT3.
        """
        flops = ModelFlops.of(meta_model(name, config, torch.bfloat16, lora))
        return cls(flops, config.model_max_length, *PASSES.get(name, PASSES["STDiT3"]))


def seconds_of(
    shape: BatchShape,
    options: Options,
    ranks: int,
    *,
    model: ModelCosts,
    element_size: int,
    recomputed: float = 0.0,
    training: bool = True,
) -> float:
    """Predict the seconds of a micro-batch on the busiest rank, without the optimizer's step.

    Forward, recomputation, backward and exchanges run one after the other. Captions count at full
    length.

    Args:
        shape: of the batch that the ranks share.
        options: of sequence parallelism; ``options.cost_model`` has the rates, and
            ``options.spans_nodes`` states whether the group lies on several nodes.
        ranks: of the group.
        model: from ``ModelCosts.of``.
        element_size: bytes of an activation's number.
        recomputed: share of the blocks whose forward is repeated in backward.
        training: False predicts a forward pass alone.

    Raises:
        ValueError: if no strategy applies to the shape.
    """
    pass_of = _Pass(shape, options, ranks, model, element_size)
    forward = pass_of.compute(model.forward) + pass_of.exchanges()
    if not training:
        return forward

    repeated = recomputed * pass_of.compute(model.forward)
    if pass_of.strategy.resends(options):
        repeated += recomputed * pass_of.exchanges()
    backward = pass_of.compute(model.backward, backward=True) + pass_of.exchanges()
    return forward + repeated + backward


class _Pass:
    """Seconds of the parts of one pass on the busiest rank."""

    def __init__(
        self,
        shape: BatchShape,
        options: Options,
        ranks: int,
        model: ModelCosts,
        element_size: int,
    ) -> None:
        self.shape, self.options, self.ranks = shape, options, ranks
        self.model, self.element_size = model, element_size
        self.rates: CostModel = options.cost_model
        self.link = options.link
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
        return self.link.seconds(sent, calls) + self.rates.with_launches(packed, operators)

    def _products(self, backward: bool) -> float:
        """FLOPs of a forward pass outside of attention; of a backward pass of gradients of
        inputs and, in layers that are trained, of weights.
        """
        flops, passes = self.model.flops, 2 if backward else 1
        per_token = passes * flops.per_token - backward * flops.frozen_per_token
        per_text_token = passes * flops.per_text_token - backward * flops.frozen_per_text_token
        if self.are_images:
            per_token -= passes * 4.0 * self.shape.width**2 * self.shape.depth

        # A rank projects the text of the samples of which it holds tokens.
        samples = -(-self.shape.num_samples // self.ranks)
        text = samples * self.model.text_length
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
        shape, layers = self.shape, self.model.flops.per_pair / (4.0 * self.shape.width)
        queries = max(1, round(self.tokens / shape.num_samples))
        rows, width = layers * shape.num_samples * shape.heads, shape.width // shape.heads
        text = self.model.text_length
        return self.rates.attention(rows, queries, text, width, backward=backward)
