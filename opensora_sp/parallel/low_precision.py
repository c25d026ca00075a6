"""Exchanges in fewer bits than the model computes in: bf16, or 8-bit floats with a scale for each token.

fp8 takes e4m3 forward, where precision counts, and e5m2 backward, where gradients need range (the formats of
Micikevicius et al., "FP8 formats for deep learning", 2022). A token's scale travels with it, so there is one exchange.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import exchange
from .layout import ExchangePlan
from .typed import once_differentiable, uncompiled

SCALE_BYTES = 4


@uncompiled  # what communicates lies between compiled graphs
def narrow_exchange(
    tokens: Tensor, plan: ExchangePlan, group: dist.ProcessGroup, *, kind: str, dtype: str | None
) -> Tensor:
    """Exchange tokens ``[n, C]`` as ``exchange`` does, sent as "bf16" or "fp8"; None sends them as they are."""
    if dtype is None:
        return exchange(tokens, plan, group, kind=kind)
    exchanged: Tensor = _NarrowExchange.apply(tokens, plan, group, kind, dtype)
    return exchanged


class _NarrowExchange(torch.autograd.Function):
    """Forward rounds, sends and widens again; backward does the same with the gradient, the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        plan: ExchangePlan,
        group: dist.ProcessGroup,
        kind: str,
        dtype: str,
    ) -> Tensor:
        ctx.plan, ctx.group, ctx.kind, ctx.dtype = plan, group, kind, dtype
        return _send(
            tokens,
            plan,
            group,
            kind,
            torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn,
            False,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        narrow = torch.bfloat16 if ctx.dtype == "bf16" else torch.float8_e5m2
        return _send(grad, ctx.plan, ctx.group, ctx.kind, narrow, True), None, None, None, None


def _send(
    x: Tensor,
    plan: ExchangePlan,
    group: dist.ProcessGroup,
    kind: str,
    narrow: torch.dtype,
    reverse: bool,
) -> Tensor:
    if narrow == torch.bfloat16:
        return exchange(x.to(narrow), plan, group, kind=kind, reverse=reverse).to(x.dtype)
    return from_bytes(
        exchange(to_bytes(x, narrow), plan, group, kind=kind, reverse=reverse), narrow, x.dtype
    )


def to_bytes(x: Tensor, narrow: torch.dtype) -> Tensor:
    """``[n, C]`` -> uint8 ``[n, C + 4]``: 8-bit floats of each token, then the float32 they are to be multiplied by."""
    largest = x.detach().abs().amax(dim=-1, keepdim=True).float()
    scale = (largest / torch.finfo(narrow).max).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (x / scale).to(torch.float32).to(narrow)
    return torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def from_bytes(payload: Tensor, narrow: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Undo ``to_bytes``, in ``dtype``."""
    # Copied, since the view as float32 needs memory and strides aligned to four bytes.
    scale = payload[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    numbers = payload[..., :-SCALE_BYTES]
    return (numbers.view(narrow).to(torch.float32) * scale.view(torch.float32)).to(dtype)
