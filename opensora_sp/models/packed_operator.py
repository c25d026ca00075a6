"""Attention to packed tokens as an operator of torch, which compiled code calls.

``torch.compile`` sees one node where eager mode runs operators that depend on the lengths
(``packed_attention.py``). So no graph ends at packed attention, and a graph serves batches of all
lengths: they are values of a tensor on the CPU, which the host reads without waiting for a device.

Both directions are operators. Forward also returns the logarithms of the sums of exponentials, from
which the backward of a kernel computes the weights again.

Legend: N packed tokens, R rows, L queries and K keys of a row, H heads, D head width, P pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from .attention import MAX_SCORES, Backend, _attend_rows, torch_varlen_kernel
from .packed_attention import by_lengths, concat, rows_of, runs_of
from .packing import MAX_ROWS, Packing, Pieces
from .varlen import FusedKernel

Gradients = tuple[Tensor, Tensor, Tensor]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, backend: str, processors: int
) -> tuple[Tensor, Tensor]:
    """Softmax attention of packed samples.

    Args:
        q, k, v: packed tokens ``[N, H, D]`` of one dtype.
        lengths: ``Packing.lengths``, int64 ``[2, samples]`` on the CPU.
        backend, processors: of a ``Backend``. For the packages of flash-attn, whose backward has no
            public name, torch's kernels stand in (``torch_varlen_kernel``).

    Returns:
        The output ``[N, H, D]``, and the logarithms of sums of exponentials, fp32 ``[N * H]``;
        zeros where backward does not use them.
    """
    if not q.numel():
        return q.new_empty(q.shape), _no_sums(q)

    packing, kernel = packing_of(lengths), torch_varlen_kernel(backend, q)
    if kernel is not None:
        return _fused_forward(kernel, q, k, v, packing.pieces(q.shape[1], processors))

    out = by_lengths(partial(_attend_rows, Backend(backend, processors)), q, k, v, packing)
    # Operators return no memory of their arguments; attention to one key may return the values.
    return (out.clone() if _share_memory(out, v) else out.contiguous()), _no_sums(q)


def _attend_fake(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, backend: str, processors: int
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[0] * q.shape[1], dtype=torch.float32)


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    lengths: Tensor,
    backend: str,
    processors: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from the arguments and results of ``_attend``."""
    if not q.numel():
        return q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)

    packing, kernel = packing_of(lengths), torch_varlen_kernel(backend, q)
    if kernel is None:
        return _explicit_backward(grad, q, k, v, packing)
    pieces = packing.pieces(q.shape[1], processors)
    return _fused_backward(kernel, grad, q, k, v, out, sums, pieces)


def _attend_backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, lengths, *ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, lengths)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *packed_attention_backward(grad, *ctx.saved_tensors, *ctx.backend), None, None, None


_operator = partial(torch.library.custom_op, mutates_args=())
packed_attention = _operator("opensora_sp::packed_attention", _attend)
packed_attention.register_fake(_attend_fake)
packed_attention.register_autograd(_differentiate, setup_context=_keep)
packed_attention_backward = _operator("opensora_sp::packed_attention_backward", _attend_backward)
packed_attention_backward.register_fake(_attend_backward_fake)


def packing_of(lengths: Tensor) -> Packing:
    """The same one for the same lengths: all blocks share what it has copied to the device."""
    queries, keys = lengths.tolist()
    return _packing(tuple(queries), tuple(keys))


@lru_cache(maxsize=64)
def _packing(queries: tuple[int, ...], keys: tuple[int, ...]) -> Packing:
    return Packing(queries, keys)


def _no_sums(q: Tensor) -> Tensor:
    return q.new_zeros(math.prod(q.shape[:-1]), dtype=torch.float32)


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _fused_forward(
    kernel: FusedKernel, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces
) -> tuple[Tensor, Tensor]:
    outputs, all_sums = [], []
    for tensors, lengths in _calls(pieces, [q], [pieces.repeat(k), pieces.repeat(v)]):
        out, sums = kernel.forward(*tensors, *lengths)
        outputs.append(out.reshape(-1, *q.shape[1:]))
        if not _keeps_sums(kernel, out, lengths):
            sums = _no_sums(out)
        all_sums.append(sums.reshape(-1))
    return concat(outputs), concat(all_sums)


def _fused_backward(
    kernel: FusedKernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    pieces: Pieces,
) -> Gradients:
    gradients: list[list[Tensor]] = [[], [], []]
    repeated = [pieces.repeat(k), pieces.repeat(v)]
    of_queries = sums.view(len(q), -1)  # in the order of the calls

    for tensors, lengths in _calls(pieces, [grad, q, out, of_queries], repeated):
        grad_part, q_part, out_part, kept, k_part, v_part = tensors
        if _keeps_sums(kernel, q_part, lengths):
            sums = kept.reshape(kernel.sums_shape(q_part, *lengths))
        else:
            _, sums = kernel.forward(q_part, k_part, v_part, *lengths)
        found = kernel.backward(grad_part, q_part, k_part, v_part, out_part, sums, *lengths)
        for own, part in zip(gradients, found, strict=True):
            own.append(part.reshape(-1, *q.shape[1:]))

    dq, dk, dv = map(concat, gradients)
    return dq.contiguous(), pieces.add_repeated(dk), pieces.add_repeated(dv)


def _calls(
    pieces: Pieces, queries: Sequence[Tensor], repeated: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], tuple[Any, ...]]]:
    """The tensors of each call of a kernel, and its lengths. Equal pieces are rows of one call.

    Args:
        queries: packed tensors with an entry for each query.
        repeated: keys and values by ``Pieces.repeat``.
    """
    count, device = len(pieces.queries), queries[0].device
    if pieces.are_equal and count <= MAX_ROWS:
        rows = [z.unflatten(0, (count, -1)) for z in queries]
        yield [*map(_dense, (*rows, *repeated))], (None, None, pieces.queries[0], pieces.keys[0])
        return

    calls = pieces.calls
    if pieces.are_equal:
        repeated = [z.flatten(0, 1) for z in repeated]
    by_query = [z.split([sum(call.queries) for call in calls]) for z in queries]
    by_key = [z.split([sum(call.keys) for call in calls]) for z in repeated]
    for call, *parts in zip(calls, *by_query, *by_key, strict=True):
        yield [*map(_dense, parts)], (*call.edges(device), *call.longest)


def _dense(z: Tensor) -> Tensor:
    """With neighbouring channels next to each other, as kernels take them."""
    return z if z.stride(-1) == 1 else z.contiguous()


def _keeps_sums(kernel: FusedKernel, q: Tensor, lengths: tuple[Any, ...]) -> bool:
    """Whether there is a sum for each query and head.

    Kernels pad pieces of different lengths: their sums are not kept, but computed again.
    """
    return math.prod(kernel.sums_shape(q, *lengths)) == math.prod(q.shape[:-1])


def _explicit_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, packing: Packing
) -> Gradients:
    """By the definition, for neighbouring samples of equal lengths at once."""
    runs = runs_of(packing.queries, packing.keys)
    grads, queries = (rows_of(z, [(run.samples, run.queries) for run in runs]) for z in (grad, q))
    keys, values = (rows_of(z, [(run.samples, run.keys) for run in runs]) for z in (k, v))

    found = [_softmax_backward(*rows) for rows in zip(grads, queries, keys, values, strict=True)]
    dq, dk, dv = (concat([rows.flatten(0, 1) for rows in of]) for of in zip(*found, strict=True))
    return dq, dk, dv


def _softmax_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Of rows ``[R, L, H, D]`` and ``[R, K, H, D]``, about ``MAX_SCORES`` scores at a time.

    For weights ``w = softmax(s)`` of scores ``s`` with gradients ``dw``, those of the scores are
    ``w * (dw - sum(w * dw))``.
    """
    wide, scale = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5
    dtype, (grad, q, k, v) = q.dtype, (z.to(wide) for z in (grad, q, k, v))
    dq, dk, dv = (z.new_zeros(z.shape) for z in (q, k, v))

    of_query = q.shape[2] * k.shape[1]
    queries = max(1, MAX_SCORES // of_query)
    rows = max(1, queries // max(1, q.shape[1]))
    for i in range(0, len(q), rows):
        for j in range(0, q.shape[1], queries):
            own, part = slice(i, i + rows), (slice(i, i + rows), slice(j, j + queries))
            scores = torch.einsum("rqhd,rkhd->rhqk", q[part] * scale, k[own])
            weights = scores.softmax(dim=-1)
            dv[own] += torch.einsum("rhqk,rqhd->rkhd", weights, grad[part])

            changes = torch.einsum("rqhd,rkhd->rhqk", grad[part], v[own])
            changes = weights * (changes - (weights * changes).sum(-1, keepdim=True)) * scale
            dq[part] = torch.einsum("rhqk,rkhd->rqhd", changes, k[own])
            dk[own] += torch.einsum("rhqk,rqhd->rkhd", changes, q[part])
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
