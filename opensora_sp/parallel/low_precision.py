"""Low-precision all-to-all: bf16, or 8-bit floats with a scale for each token.

fp8 is e4m3 forward, where precision counts, and e5m2 backward, where gradients need range
(Micikevicius et al., "FP8 formats for deep learning", 2022). A token's scale is sent with it, so
that there is one exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.dynamo import uncompiled

from .collectives import exchange
from .layout import ExchangePlan
from .typed import once_differentiable

SCALE_BYTES = 4
FORWARD = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
BACKWARD = {"bf16": torch.bfloat16, "fp8": torch.float8_e5m2}


def bytes_per_token(width: int, element_size: int, dtype: str | None) -> int:
    """Bytes that are sent for a token of ``width`` numbers, None for numbers as they are."""
    if dtype is None:
        return width * element_size
    return width * FORWARD[dtype].itemsize + (SCALE_BYTES if dtype == "fp8" else 0)


@uncompiled  # what is sent is rounded between compiled graphs
def low_precision_exchange(
    tokens: Tensor, plan: ExchangePlan, group: dist.ProcessGroup, *, kind: str, dtype: str
) -> Tensor:
    """Exchange tokens ``[n, C]``, sent as "bf16" or "fp8"."""
    send = partial(exchange, plan=plan, group=group, kind=kind)
    exchanged: Tensor = _LowPrecisionExchange.apply(tokens, send, dtype)
    return exchanged


class _LowPrecisionExchange(torch.autograd.Function):
    """Forward rounds, sends and widens; backward does so with the gradient, in reverse."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, send: Callable[..., Tensor], dtype: str) -> Tensor:
        ctx.send, ctx.dtype = send, dtype
        return _rounded(send, tokens, FORWARD[dtype])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rounded(partial(ctx.send, reverse=True), grad, BACKWARD[ctx.dtype]), None, None


def _rounded(send: Callable[[Tensor], Tensor], x: Tensor, sent_as: torch.dtype) -> Tensor:
    """``send(x)``, sent as another dtype."""
    if sent_as == torch.bfloat16:
        return send(x.to(sent_as)).to(x.dtype)
    return from_bytes(send(to_bytes(x, sent_as)), sent_as, x.dtype)


def to_bytes(x: Tensor, sent_as: torch.dtype) -> Tensor:
    """``[n, C]`` -> uint8 ``[n, C + 4]``: 8-bit floats of each token, then their fp32 scale."""
    largest = x.detach().abs().amax(dim=-1, keepdim=True).float()
    scale = (largest / torch.finfo(sent_as).max).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (x / scale).to(torch.float32).to(sent_as)
    return torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def from_bytes(payload: Tensor, sent_as: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Undo ``to_bytes``, in ``dtype``."""
    # Copied, since the view as float32 needs memory and strides aligned to four bytes.
    scale = payload[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    numbers = payload[..., :-SCALE_BYTES]
    return (numbers.view(sent_as).to(torch.float32) * scale.view(torch.float32)).to(dtype)
