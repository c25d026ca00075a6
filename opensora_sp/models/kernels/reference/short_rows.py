"""Softmax attention over short rows, by its definition."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..examples import Example, Sizes, normal

# What the Triton kernel takes.
LENGTHS = range(1, 33)
HEAD_WIDTHS = range(1, 129)


def attend_short_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``softmax(q k^T / sqrt(D)) v`` of each row and head, in at least float32.

    Args:
        q, k, v: ``[R, T, H, D]`` with any strides; for the Triton kernel of one dtype, T in
            ``LENGTHS`` and D in ``HEAD_WIDTHS``.

    Returns:
        ``[R, T, H, D]`` in the dtype of ``q``.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("rqhd,rkhd->rhqk", q.to(wide) * q.shape[-1] ** -0.5, k.to(wide))
    return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(dim=-1), v.to(wide)).to(q.dtype)


def examples(sizes: Sizes) -> Iterator[Example]:
    """Rows that are padded to 16 and to 32 tokens: of queries, keys and values side by side, and
    of queries and keys that a norm has written apart."""
    if sizes.head_width not in HEAD_WIDTHS:
        return

    for length in (15, 30):
        shape = 3, length, sizes.heads, sizes.head_width
        q, k, v = torch.stack([normal(*shape, seed=seed) for seed in range(3)], dim=2).unbind(2)
        for queries, keys in ((q, k), (q.contiguous(), k.contiguous())):
            arguments = dict(q=queries, k=keys, v=v)
            yield Example("attend_short_rows", arguments, gradients=("q", "k", "v"))
