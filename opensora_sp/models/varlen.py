"""Torch's kernels for packed tokens, with the arguments of flash-attn's ``flash_attn_varlen_func``.

They are operators of torch's own nested tensors, with derivatives that autograd knows but without a
public name before 2.10. Their first arguments have stayed the same since 2.2. Where a later torch
changes them, ``available`` is False.

Compiled code differentiates nothing: there ``packed_operator.py`` calls ``forward`` and
``backward`` of a kernel.

Legend: N packed tokens, P pieces, R rows, L queries of a row, H heads, D head width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
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
SUMS_TILE = 32  # memory-efficient attention pads the sums of a row to a multiple


class FusedKernel:
    """Forward and backward of attention to packed tokens, or to rows.

    ``lengths`` are where queries and where keys begin, int32 ``[P + 1]`` each, and the longest of
    each. Without the former (None) the tensors are rows.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
        """The output, shaped like ``q``: packed tokens ``[N, H, D]`` or rows ``[R, L, H, D]``."""
        return self.forward(q, k, v, *lengths)[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> tuple[Tensor, Tensor]:
        """The output, and for backward the logarithms of sums of exponentials in fp32.

        Where all rows or pieces have as many queries, the latter have ``sums_shape``.
        """
        raise NotImplementedError

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sums: Tensor,
        *lengths: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        raise NotImplementedError

    def sums_shape(self, q: Tensor, *lengths: Any) -> tuple[int, ...]:
        """``[R, H, L]`` of the sums, if all rows or pieces have L queries."""
        rows = len(q) if q.ndim == 4 else len(lengths[0]) - 1
        return rows, q.shape[-2], lengths[2]


class Flash(FusedKernel):
    """FlashAttention-2 in fp16 or bf16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> tuple[Tensor, Tensor]:
        forward = torch.ops.aten._flash_attention_forward
        out, sums, *_ = forward(q, k, v, *lengths, 0.0, False, False)
        return out, sums

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sums: Tensor,
        *lengths: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout there are no random numbers to draw again.
        state = torch.empty((), dtype=torch.int64, device=q.device)
        backward = torch.ops.aten._flash_attention_backward
        return backward(grad, q, k, v, out, sums, *lengths, 0.0, False, state, state)

    def sums_shape(self, q: Tensor, *lengths: Any) -> tuple[int, ...]:
        if q.ndim == 3 and _packs_sums():
            return q.shape[-2], len(q)
        return super().sums_shape(q, *lengths)


class Efficient(FusedKernel):
    """Memory-efficient attention, also in fp32."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> tuple[Tensor, Tensor]:
        forward = torch.ops.aten._efficient_attention_forward
        rows = (z if z.ndim == 4 else z[None] for z in (q, k, v))
        out, sums, *_ = forward(*rows, None, *lengths, 0.0, 0, True)
        return out.view(q.shape), sums[..., : lengths[2]]

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sums: Tensor,
        *lengths: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = F.pad(sums, (0, -sums.shape[-1] % SUMS_TILE), value=torch.inf)
        state = torch.empty((), dtype=torch.int64, device=q.device)
        edges, longest = lengths[:2], lengths[2:]
        rows = (z if z.ndim == 4 else z[None] for z in (grad, q, k, v))
        backward = torch.ops.aten._efficient_attention_backward

        *gradients, _ = backward(
            *rows,
            None,
            out.view(-1, *q.shape[-3:]),
            *edges,
            *longest,
            sums,
            0.0,
            state,
            state,
            0,
            False,
        )
        dq, dk, dv = (z.view(like.shape) for z, like in zip(gradients, (q, k, v), strict=True))
        return dq, dk, dv


@cache
def _packs_sums() -> bool:
    """Whether FlashAttention packs the sums, ``[H, N]``, as torch after 2.5 does."""
    q = torch.empty(3, 1, 8, dtype=torch.float16, device="meta")
    edges = torch.empty(3, dtype=torch.int32, device="meta")
    _, sums = flash.forward(q, q, q, edges, edges, 2, 2)
    return sums.ndim == 2


flash, efficient = Flash(), Efficient()


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
