"""Softmax attention over short rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .selection import chosen

# What the Triton kernel takes.
LENGTHS = range(1, 33)
HEAD_WIDTHS = range(1, 129)


def explicit_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``softmax(q k^T / sqrt(D)) v`` of each row and head by its definition, in at least float32.

    Args:
        q, k, v: ``[R, T, H, D]`` with any strides; keys and values may differ in T from queries.

    Returns:
        ``[R, T, H, D]`` in the dtype of ``q``.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("rqhd,rkhd->rhqk", q.to(wide) * q.shape[-1] ** -0.5, k.to(wide))
    return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(dim=-1), v.to(wide)).to(q.dtype)


def attend_short_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``explicit_softmax`` in the dtype of ``v``; T in ``LENGTHS`` and D in ``HEAD_WIDTHS``."""
    # Under autocast, norms leave queries and keys wider than values.
    q, k = q.to(v.dtype), k.to(v.dtype)
    if chosen("short_rows", v):
        from .triton import short_rows as kernel

        return kernel.attend_short_rows(q, k, v)
    return explicit_softmax(q, k, v)
