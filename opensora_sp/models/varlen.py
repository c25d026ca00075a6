"""Torch's kernels for packed tokens, with the arguments of flash-attn's ``flash_attn_varlen_func``.

They are operators of torch's own nested tensors, with derivatives that autograd knows but without a
public name before 2.10. Their first arguments have stayed the same since 2.2. Where a later torch
changes them, ``available`` is False.

Legend: N packed tokens, P pieces, H heads, D head width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Kernel = Callable[..., Tensor]

ARGUMENTS = {
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    ),
    "_efficient_attention_forward": (
        "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
        "custom_mask_type compute_log_sumexp"
    ),
}


def flash(q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
    """FlashAttention-2 of packed tokens ``[N, H, D]`` in fp16 or bf16; returns their shape.

    ``lengths`` are where queries and where keys of each piece begin, int32 ``[P + 1]`` each, and
    the longest of each.
    """
    forward = torch.ops.aten._flash_attention_forward
    out: Tensor = forward(q, k, v, *lengths, 0.0, False, False)[0]
    return out


def efficient(q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
    """Memory-efficient attention with the same arguments, also in fp32."""
    forward = torch.ops.aten._efficient_attention_forward
    out: Tensor = forward(q[None], k[None], v[None], None, *lengths, 0.0, 0, True)[0]
    return out.view(q.shape)


@cache
def available(operator: str) -> bool:
    """Whether this torch has the operator with the arguments passed here. Logs once if not."""
    expected = ARGUMENTS[operator].split()
    found: list[str] = []
    if overloads := getattr(torch.ops.aten, operator, None):
        found = [argument.name for argument in overloads.default._schema.arguments]
    if found[: len(expected)] == expected:
        return True

    logger.warning(
        "torch's %s takes %s; packed samples are grouped by their lengths instead", operator, found
    )
    return False
