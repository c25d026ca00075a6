"""Attention, behind one function.

``attention`` takes rows of equal length (self-attention over the rows of a layout) or packed tokens
with lengths (cross-attention to texts of different lengths). No mask tensor is ever built, so no
tensor is quadratic in a length.

Which kernel computes it is chosen by name or from a table (``attention_table.py``):

* ``short_rows``: the Triton kernel for rows of up to 32 tokens (``kernels/triton``);
* ``flash``, ``flash3``: FlashAttention-2 (Dao, 2023) of the flash-attn 2.x package, and
  FlashAttention-3 (Shah et al., 2024) of the flash-attn 3 package;
* ``cudnn``: cuDNN's kernel, by torch's scaled dot product attention;
* ``sdpa``: torch's FlashAttention-2 or, where that cannot run, its memory-efficient kernel;
* ``reference``: an explicit softmax in at least float32, a bounded number of scores at a time.

Packed tokens of unequal lengths take the package's varlen function or, on CUDA, torch's kernels
below its scaled dot product attention (``torch_flash``, ``torch_efficient``), with the arguments of
``flash_attn_varlen_func``. These are operators of torch's nested tensors, with derivatives that
autograd knows. Without a kernel, samples of equal lengths share a call.

Legend: R rows, L tokens of a row, N packed tokens, H heads, D head width, P pieces of samples.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from opensora_sp.common.graphs import uncompiled

from .attention_table import (
    FLASH_KERNELS,
    HOPPER,
    KERNELS,
    LABELS,
    NAMES,
    Backend,
    Choice,
    Platform,
    Sequences,
    choose,
    flash_obstacle,
    names_by_kind,
    obstacle,
)
from .functions import with_zero_gradients
from .kernels.fused import attend_short_rows, chosen, explicit_softmax
from .packing import MAX_ROWS, Call, Lengths, Packing

logger = logging.getLogger(__name__)

BACKENDS = NAMES
# Numbers in one tensor of the reference: 16 MB in float32.
MAX_SCORES = 2**22
# On meta tensors the planner traces the calls of a recent GPU.
GPUS = ("cuda", "meta")
# Of such a GPU, an H100 or H200.
PROCESSORS = 132

Kernel = Callable[..., Tensor]

# Names in ``KERNELS`` that failed verification on this device.
_refused: frozenset[str] = frozenset()


def set_refused(names: Iterable[str]) -> None:
    """Set which kernels this process runs no more.

    ``opensora_sp.device_verification`` compares the kernels of a run and calls this.
    """
    global _refused
    _refused = frozenset(names)


# Kernels of packages and lengths of packed tokens belong to no graph.
@uncompiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Lengths | Packing | None = None,
    backend: str | Backend = "auto",
) -> Tensor:
    """Softmax attention, ``softmax(q k^T / sqrt(D)) v``, per row or per packed sample.

    Args:
        q, k, v: ``[R, L, H, D]`` if every row attends to itself; with ``lengths`` packed tokens
            ``[N, H, D]``.
        lengths: (query lengths, key lengths) of each sample, host integers that sum to N of q and
            of k. A query length may be 0; a key length is at least 1. With a ``Packing``, calls
            share their copies on the device.
        backend: one of ``BACKENDS``, or a result of ``resolve``.

    Returns:
        A tensor shaped like ``q``; of packed tokens in the dtype of ``v``.

    Raises:
        ValueError: for an unknown backend, or one that cannot run.
    """
    if isinstance(backend, str):
        length = k.shape[1] if lengths is None else None
        sequences = Sequences(q.dtype, q.shape[-1], length=length, packed=length is None)
        backend = resolve(backend, sequences, q.device)
    if lengths is None:
        return _attend_rows(backend, q, k, v)
    packing = lengths if isinstance(lengths, Packing) else Packing(*lengths)
    return _attend_packed(backend, q, k, v, packing)


def choose_backends(
    setting: str | Mapping[str, str], sequences: Mapping[str, Sequences], device: torch.device
) -> dict[str, Backend]:
    """Resolve what a config sets for each kind of attention of a batch.

    Args:
        setting: a name for all kinds, or names by kind.
        sequences: what attends to what, by kind.

    Raises:
        ValueError: as ``attention``.
    """
    names = names_by_kind(setting)
    return {kind: resolve(names[kind], sequences[kind], device) for kind in sequences}


def resolve(name: str, sequences: Sequences, device: torch.device) -> Backend:
    """Resolve the name of a backend.

    Raises:
        ValueError: as ``attention``.
    """
    # Meta tensors stand for tensors on a GPU, and take no memory of it.
    like = torch.empty(0, dtype=sequences.dtype, device="meta" if device.type in GPUS else device)
    if chosen("short_rows", like):
        sequences = replace(sequences, short_rows=True)
    if device.type == "cuda":
        sequences = replace(sequences, refused=_refused)
    return _choose(name, sequences, device, torch.are_deterministic_algorithms_enabled())


@cache
def _choose(name: str, sequences: Sequences, device: torch.device, deterministic: bool) -> Backend:
    if device.type == "meta" and name in FLASH_KERNELS:
        # torch's own kernels allocate about the same.
        name, sequences = "auto", replace(sequences, short_rows=False)
    choice = choose(name, sequences, Platform.of(device, deterministic))
    _log(sequences.kind, choice)

    processors = PROCESSORS if device.type == "meta" else 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Backend(choice.kernel, processors, deterministic)


# once, however many lengths there are.
@cache
def _log(kind: str | None, choice: Choice) -> None:
    label = LABELS[kind] if kind else "attention backend"
    logger.info("%s: %s (%s)", label, KERNELS[choice.kernel], choice.reason)


def _attend_rows(backend: Backend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Kernels refuse the empty tensors of ranks without tokens.
    if backend.name == "reference" or not q.numel():
        return _explicit(q, k, v)
    if k.shape[1] == 1:
        # One key has all the weight. Kernels would fill a tile of 64 or 128 queries for each row.
        return v if q is v else with_zero_gradients(v.expand(q.shape).contiguous(), q, k)

    if backend.name == "short_rows":
        return attend_short_rows(q, k, v)

    assert backend.name in (*FLASH_KERNELS, "sdpa"), backend.name
    kernel = _package_kernel(backend, "flash_attn_func") or partial(_sdpa_rows, backend.name)
    if len(q) <= MAX_ROWS:
        # The backward of a split is a copy.
        return kernel(q, k, v)
    parts = zip(*(z.split(MAX_ROWS) for z in (q, k, v)), strict=True)
    return torch.cat([kernel(*part) for part in parts])


def _varlen_kernel(backend: Backend, q: Tensor) -> Kernel | None:
    """A kernel for packed tokens with the arguments of ``torch_flash``, if there is one."""
    if package_kernel := _package_kernel(backend, "flash_attn_varlen_func"):
        return package_kernel
    if backend.name == "reference" or q.device.type not in GPUS:
        return None
    return torch_varlen_kernel(Sequences(q.dtype, q.shape[-1]), q.device)


# Each block asks, and looking for packages takes longer than many kernels.
@cache
def torch_varlen_kernel(sequences: Sequences, device: torch.device) -> Kernel | None:
    """FlashAttention-2 of torch for packed tokens, where it takes queries whose dtype autocast may
    have set, or the memory-efficient kernel; None where neither does.
    """
    platform = Platform.of(device, deterministic=False)
    if obstacle("sdpa", sequences, platform) is not None:
        return None
    return torch_efficient if flash_obstacle(sequences, platform) else torch_flash


def _package_kernel(backend: Backend, function: str) -> Kernel | None:
    """A function of the package of FlashAttention that a backend stands for, if it does."""
    if backend.name == "flash":
        import flash_attn

        return partial(getattr(flash_attn, function), deterministic=backend.deterministic)
    if backend.name == "flash3":
        return partial(_flash_attn_3, function, backend.deterministic)
    return None


def _flash_attn_3(
    function: str, deterministic: bool, q: Tensor, k: Tensor, v: Tensor, *lengths: Tensor | int
) -> Tensor:
    import flash_attn_interface

    # Pieces of queries share their keys in memory (packing.py); its TMA copies need real strides.
    k, v = (z if z.stride(0) else z.contiguous() for z in (k, v))
    attend = getattr(flash_attn_interface, function)
    out = attend(q, k, v, *lengths, deterministic=deterministic)
    # Builds until August 2025 return the logarithms of the softmax's sums as well.
    return out[0] if isinstance(out, tuple) else out


def _sdpa_rows(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (z.transpose(1, 2) for z in (q, k, v))  # [R, H, L, D]
    if q.is_cuda:
        out = _pinned_sdpa(name, q, k, v)
    elif q.is_meta:
        out = traced_sdpa(q, k, v)
    else:
        out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2)


def traced_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operator that SDPA calls on a GPU; of meta tensors it would trace matrices of scores."""
    aten = torch.ops.aten
    obstacle = flash_obstacle(Sequences(q.dtype, q.shape[-1]), Platform(HOPPER))
    if obstacle is None:
        return aten._scaled_dot_product_flash_attention(q, k, v)[0]
    keep_sums = torch.is_grad_enabled()
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, keep_sums)[0]


def _pinned_sdpa(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Without the backend that builds matrices of scores.
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if name == "cudnn":
        # torch takes the next one where it knows that cuDNN cannot take a call.
        backends.insert(0, SDPBackend.CUDNN_ATTENTION)
    with sdpa_kernel(backends, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v)


def _attend_packed(backend: Backend, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Attention of packed samples, by a kernel for packed tokens or for rows of equal lengths."""
    # Under autocast, norms leave queries and keys wider than values, which no kernel takes.
    q, k = q.to(v.dtype), k.to(v.dtype)
    sums = sum(packing.queries), sum(packing.keys)
    assert (len(q), len(k)) == sums, "lengths must add up to the tokens"

    kernel = _varlen_kernel(backend, q) if q.numel() else None
    if kernel is None:
        return _by_lengths(backend, q, k, v, packing)

    pieces = packing.pieces(q.shape[1], backend.processors)
    # Each piece of a sample's queries attends to all keys of the sample.
    k, v = pieces.repeat(k), pieces.repeat(v)
    if pieces.are_equal:
        rows = q.unflatten(0, (len(pieces.queries), -1))  # [P, L, H, D]
        return _attend_rows(backend, rows, k, v).flatten(0, 1)
    return _in_calls(kernel, q, k, v, pieces.calls)


def _by_lengths(backend: Backend, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Samples of equal lengths share a call, wherever they lie."""
    # Here no kernel takes packed tokens, as on a CPU, and a call for each sample would be slow.
    alike = defaultdict(list)
    for i, lengths in enumerate(zip(packing.queries, packing.keys, strict=True)):
        alike[lengths].append(i)

    if len(alike) == 1:
        rows = [z.unflatten(0, (len(packing.queries), -1)) for z in (q, k, v)]
        return _attend_rows(backend, *rows).flatten(0, 1)

    q_samples = q.split(packing.queries)
    k_samples, v_samples = k.split(packing.keys), v.split(packing.keys)
    out: list[Any] = [None] * len(packing.queries)
    for indices in alike.values():
        same_lengths = []
        for samples in (q_samples, k_samples, v_samples):
            same_lengths.append(torch.stack([samples[i] for i in indices]))
        rows_out = _attend_rows(backend, *same_lengths)
        for i, row in zip(indices, rows_out.unbind(), strict=True):
            out[i] = row
    return torch.cat(out)


def _in_calls(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, calls: list[Call]) -> Tensor:
    """Attention by a kernel for packed tokens, some pieces at a time."""
    if len(calls) == 1:
        # The backward of a split is a copy.
        return kernel(q, k, v, *calls[0].edges(q.device), *calls[0].longest)
    queries, keys = [sum(call.queries) for call in calls], [sum(call.keys) for call in calls]
    parts = zip(q.split(queries), k.split(keys), v.split(keys), calls, strict=True)
    return torch.cat([_in_calls(kernel, q, k, v, [call]) for q, k, v, call in parts])


def torch_flash(q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
    """FlashAttention-2 of packed tokens ``[N, H, D]`` in fp16 or bf16; returns their shape.

    ``lengths`` are where queries and where keys of each piece begin, int32 ``[P + 1]`` each, and
    the longest of each.
    """
    forward = torch.ops.aten._flash_attention_forward
    out: Tensor = forward(q, k, v, *lengths, 0.0, False, False)[0]
    return out


def torch_efficient(q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
    """Memory-efficient attention with the same arguments, also in fp32."""
    forward = torch.ops.aten._efficient_attention_forward
    out: Tensor = forward(q[None], k[None], v[None], None, *lengths, 0.0, 0, True)[0]
    return out.view(q.shape)


def _explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, at most ``MAX_SCORES`` scores at a time, which backward computes again."""
    _, num_queries, num_heads, _ = q.shape
    query_scores = num_heads * k.shape[1]
    if len(q) * num_queries * query_scores <= MAX_SCORES:
        return explicit_softmax(q, k, v)

    # The gradients of all chunks of queries are added to keys and values: not in 16 bits.
    k, v = (z.to(torch.promote_types(z.dtype, torch.float32)) for z in (k, v))
    rows = max(1, MAX_SCORES // (num_queries * query_scores))
    queries = max(1, MAX_SCORES // query_scores)
    attend = partial(checkpoint, explicit_softmax, use_reentrant=False, preserve_rng_state=False)
    out = []
    for q_rows, k_rows, v_rows in zip(*(z.split(rows) for z in (q, k, v)), strict=True):
        parts = [attend(part, k_rows, v_rows) for part in q_rows.split(queries, dim=1)]
        out.append(torch.cat(parts, dim=1))
    return torch.cat(out)
