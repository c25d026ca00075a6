"""peft's layer of a ``Linear`` with a low-rank adapter, with less memory traffic.

Legend: N tokens, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear, LoraConfig
from torch import Tensor, nn

from .feature_dropout import FeatureDropout


class AdaptedLinear(Linear):
    """``base_layer(x) + scaling * B A x``, where the sum is a part of the last matrix product.

    peft scales and adds the whole output, and multiplies its gradient: of STDiT3-XL/2 in eager mode
    a step of adapters would take longer than one of all weights. DoRA is computed by peft.

    Args:
        layer: is kept as ``base_layer``.
        name: of the adapter.
        rank: of A and B.
        alpha: scale of the adapter, times ``rank``, or its root with ``use_rslora``.
        dropout: rate of ``FeatureDropout``.
        kind: ``use_rslora`` and ``use_dora`` of peft's config.
    """

    def __init__(
        self,
        layer: nn.Linear,
        name: str,
        *,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        **kind: bool,
    ) -> None:
        # alpha is annotated as int, and only divided.
        super().__init__(layer, name, LoraConfig(**kind), r=rank, lora_alpha=alpha)  # type: ignore
        if dropout > 0:
            self.lora_dropout[name] = FeatureDropout(layer.in_features, dropout)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        if self.disable_adapters or self.merged or self.lora_variant or options:
            whole: Tensor = super().forward(x, *args, **options)
            return whole

        (name,) = self.active_adapters
        base_layer: Any = self.base_layer
        out: Tensor = base_layer(x)
        a: Any = self.lora_A[name]
        b: Any = self.lora_B[name]
        # Columns of A are dropped instead of features of all tokens.
        columns = self.lora_dropout[name](a.weight)  # [r, in]
        down = self.scaling[name] * F.linear(x, columns)  # [..., r]
        up = b.weight  # [out, r]
        added = torch.addmm(out.flatten(0, -2), down.flatten(0, -2), up.t())  # [N, out]
        return added.view_as(out)
