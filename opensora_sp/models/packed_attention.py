"""Attention over packed tokens: samples of different lengths, one after the other.

Kernels for packed tokens take all of them in a call. Where there is none, samples of equal lengths
share a call. Which of the two, ``attention.py`` chooses.

Torch's kernels (``flash``, ``efficient``) have the arguments of flash-attn's
``flash_attn_varlen_func``. They are operators of torch's nested tensors, with derivatives that
autograd knows but without a public name before 2.10. Their first arguments have stayed the same
since 2.2. Where a later torch changes them, ``available`` is False.

Legend: N packed tokens, R rows, L tokens of a row, H heads, D head width, P pieces of samples.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .packing import Call, Lengths, Packing

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


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths | Packing,
    *,
    attend_rows: Callable[..., Tensor],
    kernel_for: Callable[[Tensor], Kernel | None],
    processors: int,
) -> Tensor:
    """Softmax attention of packed samples.

    Args:
        q, k, v, lengths: as ``attention``.
        attend_rows: attention of rows of equal lengths ``[R, L, H, D]``.
        kernel_for: a kernel for packed tokens such as these queries, if there is one. Without one,
            samples of equal lengths are rows of a call.
        processors: multiprocessors of the device. Queries are cut into pieces for them.

    Returns:
        A tensor shaped like ``q``, in the dtype of ``v``.
    """
    packing = lengths if isinstance(lengths, Packing) else Packing(*lengths)
    # Under autocast, norms leave queries and keys wider than values, which no kernel takes.
    q, k = q.to(v.dtype), k.to(v.dtype)
    sums = sum(packing.queries), sum(packing.keys)
    assert (len(q), len(k)) == sums, "lengths must add up to the tokens"

    kernel = kernel_for(q) if q.numel() else None
    if kernel is None:
        return by_lengths(attend_rows, q, k, v, packing)

    pieces = packing.pieces(q.shape[1], processors)
    k, v = pieces.repeat(k), pieces.repeat(v)
    if pieces.are_equal:
        rows = q.unflatten(0, (len(pieces.queries), -1))  # [P, L, H, D]
        return attend_rows(rows, k, v).flatten(0, 1)
    return _in_calls(kernel, q, k, v, pieces.calls)


def by_lengths(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
) -> Tensor:
    """Samples of equal lengths share a call, wherever they lie."""
    runs = runs_of(packing.queries, packing.keys)
    q_rows = rows_of(q, [(run.samples, run.queries) for run in runs])
    k_rows, v_rows = (rows_of(z, [(run.samples, run.keys) for run in runs]) for z in (k, v))

    alike = defaultdict(list)
    for i, run in enumerate(runs):
        alike[run.queries, run.keys].append(i)

    out: list[Any] = [None] * len(runs)
    for indices in alike.values():
        rows = attend(*(concat([z[i] for i in indices]) for z in (q_rows, k_rows, v_rows)))
        parts = split(rows, [runs[i].samples for i in indices])
        for i, part in zip(indices, parts, strict=True):
            out[i] = part.flatten(0, 1)
    return concat(out)


def rows_of(z: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Packed tokens ``[N, H, D]`` as ``[samples, length, H, D]`` for each of the shapes."""
    parts = split(z, [samples * length for samples, length in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def concat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split(z: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Parts of these sizes along the first dim."""
    # The backward of torch's split is a copy, of a single part as well.
    return (z,) if len(sizes) == 1 else z.split(sizes)


@dataclass(frozen=True)
class Run:
    """Neighbouring samples of equal lengths."""

    samples: int
    queries: int
    keys: int


# The blocks of a model ask alike, perhaps for thousands of rows.
@lru_cache(maxsize=64)
def runs_of(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...]) -> list[Run]:
    samples = groupby(zip(q_lengths, k_lengths, strict=True))
    return [Run(len(list(equal)), *lengths) for lengths, equal in samples]


def _in_calls(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, calls: list[Call]) -> Tensor:
    """Attention by a kernel for packed tokens, some pieces at a time."""
    q_parts = split(q, [sum(call.queries) for call in calls])
    k_parts, v_parts = (split(z, [sum(call.keys) for call in calls]) for z in (k, v))

    out = []
    for q_part, k_part, v_part, call in zip(q_parts, k_parts, v_parts, calls, strict=True):
        out.append(kernel(q_part, k_part, v_part, *call.edges(q.device), *call.longest))
    return concat(out)


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
    """True if this torch has the operator with the arguments passed here. Logs once if not."""
    expected = ARGUMENTS[operator].split()
    arguments: list[str] = []
    if overloads := getattr(torch.ops.aten, operator, None):
        arguments = [argument.name for argument in overloads.default._schema.arguments]
    if arguments[: len(expected)] == expected:
        return True

    logger.warning(
        "torch's %s takes %s; packed samples are grouped by their lengths instead",
        operator,
        arguments,
    )
    return False
