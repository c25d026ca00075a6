"""Attention, behind one function.

``attention`` takes equal rows (self-attention over the rows of a layout) or packed tokens with lengths (cross-attention
to text of differing length). No mask tensor is ever built, so no tensor is quadratic in a length.

Legend: R rows, L tokens of a row, N packed tokens, H heads, D head width.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)


def attention(q: Tensor, k: Tensor, v: Tensor, *, lengths: tuple[Sequence[int], Sequence[int]] | None = None) -> Tensor:
    """Softmax attention, ``softmax(q k^T / sqrt(D)) v``, per row or per packed sample.

    Args:
        q, k, v: ``[R, L, H, D]`` where every row attends within itself; with ``lengths`` packed tokens ``[N, H, D]``.
        lengths: (query lengths, key lengths) of each sample, host integers that sum to N of q and of k. A query
            length may be 0; a key length is at least 1.

    Returns:
        A tensor shaped like ``q``.
    """
    flash = _use_flash(q.is_cuda, q.dtype) and q.numel() > 0  # flash-attn refuses ranks that hold no token
    return (_flash if flash else _sdpa)(q, k, v, lengths)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Sequence[int], Sequence[int]] | None) -> Tensor:
    if lengths is None:
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))  # [R, H, L, D]
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    out, q_from, k_from = [], 0, 0
    for (q_len, k_len), same in groupby(zip(*lengths, strict=True)):  # neighbours of equal lengths share a call
        n = len(list(same))
        q_to, k_to = q_from + n * q_len, k_from + n * k_len
        part = _sdpa(
            q[q_from:q_to].unflatten(0, (n, q_len)),
            k[k_from:k_to].unflatten(0, (n, k_len)),
            v[k_from:k_to].unflatten(0, (n, k_len)),
            None,
        )
        out.append(part.flatten(0, 1))
        q_from, k_from = q_to, k_to
    return torch.cat(out)


def _flash(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Sequence[int], Sequence[int]] | None) -> Tensor:
    """FlashAttention-2 (Dao, 2023), through the flash-attn 2.x package."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    if lengths is None:
        return flash_attn_func(q, k, v)
    edges = [F.pad(torch.tensor(one).cumsum(0), (1, 0)).to(q.device, torch.int32) for one in lengths]
    return flash_attn_varlen_func(q, k, v, edges[0], edges[1], max(lengths[0]), max(lengths[1]))


@cache
def _use_flash(is_cuda: bool, dtype: torch.dtype) -> bool:
    """Decide once per kind of tensor, and say so."""
    if not is_cuda:
        choice, reason = False, "the tensors are not on a GPU"
    elif dtype not in (torch.float16, torch.bfloat16):
        choice, reason = False, f"{dtype} is not fp16 or bf16"
    elif importlib.util.find_spec("flash_attn") is None:
        choice, reason = False, "flash-attn is not installed"
    else:
        choice, reason = True, "flash-attn is installed"
    logger.info("attention backend: %s (%s)", "flash-attn" if choice else "torch SDPA", reason)
    return choice
