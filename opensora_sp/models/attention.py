"""Attention, behind one function.

``attention`` takes rows of equal length (self-attention over the rows of a layout) or packed tokens
with lengths (cross-attention to texts of different lengths). No mask tensor is ever built, so no
tensor is quadratic in a length.

Which kernel computes it is chosen by name or from a table (``attention_table.py``):

* ``flash``, ``flash3``: FlashAttention-2 (Dao, 2023) of the flash-attn 2.x package, and
  FlashAttention-3 (Shah et al., 2024) of the flash-attn 3 package;
* ``cudnn``, ``torch_flash``, ``efficient``: one kernel of torch's scaled dot product attention;
* ``sdpa``: the one that torch prefers;
* ``reference``: an explicit softmax in at least float32, a bounded number of scores at a time.

Packed tokens of unequal lengths take the package's varlen function or, on CUDA, torch's kernels
below its scaled dot product attention (``packed_attention.py``).

Legend: R rows, L tokens of a row, N packed tokens, H heads, D head width, P pieces of samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from opensora_sp.common.graphs import uncompiled

from .attention_table import (
    LABELS,
    NAMES,
    SAFE_CUDNN,
    Choice,
    Platform,
    Sequences,
    choose,
    names_by_kind,
    obstacle,
)
from .functions import with_zero_gradients
from .kernels import attend_short_rows, chosen
from .kernels.short_rows import explicit_softmax
from .packed_attention import Kernel, attend_packed, available, efficient, flash
from .packing import MAX_ROWS, Lengths, Packing

logger = logging.getLogger(__name__)

BACKENDS = NAMES
# Numbers in one tensor of the reference: 16 MB in float32.
MAX_SCORES = 2**22
# On meta tensors the planner traces the calls of a recent GPU.
GPUS = ("cuda", "meta")
# Of such a GPU, an H100 or H200.
PROCESSORS = 132


@dataclass(frozen=True)
class Backend:
    """A kernel for one kind of tensors; ``choose_backend`` resolves a name to it.

    Args:
        name: a name in ``attention_table.KERNELS``.
        processors: multiprocessors of the device. Packed queries are cut into pieces for them.
        deterministic: gradients of queries are summed without atomics
            (``torch.use_deterministic_algorithms``).
    """

    name: str
    processors: int = 1
    deterministic: bool = False


# Names in ``KERNELS`` that failed verification on this device, by kind of attention.
_refused: dict[str, frozenset[str]] = {}


def set_refused(refused: Mapping[str, Collection[str]]) -> None:
    """Set which kernels this process runs no more, by kind of attention.

    ``opensora_sp.device_verification`` compares the kernels of a run and calls this.
    """
    _refused.clear()
    _refused.update({kind: frozenset(names) for kind, names in refused.items()})


@dataclass(frozen=True)
class Backends:
    """The backend of each kind of attention in a batch, or its name."""

    spatial: str | Backend = "auto"
    temporal: str | Backend = "auto"
    cross: str | Backend = "auto"


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
        backend: one of ``BACKENDS``, or a result of ``choose_backend``.

    Returns:
        A tensor shaped like ``q``; of packed tokens in the dtype of ``v``.

    Raises:
        ValueError: for an unknown backend, or one that cannot run.
    """
    if isinstance(backend, str):
        length = k.shape[1] if lengths is None else None
        backend = choose_backend(backend, q.device, q.dtype, q.shape[-1], length=length)
    if lengths is None:
        return _attend_rows(backend, q, k, v)
    return attend_packed(
        q,
        k,
        v,
        lengths,
        attend_rows=partial(_attend_rows, backend),
        kernel_for=partial(_varlen_kernel, backend),
        processors=backend.processors,
    )


def choose_backends(
    setting: str | Mapping[str, str], sequences: Mapping[str, Sequences], device: torch.device
) -> Backends:
    """Resolve what a config sets for each kind of attention of a batch.

    Args:
        setting: a name for all kinds, or names by kind.
        sequences: what attends to what, by kind.

    Raises:
        ValueError: as ``attention``.
    """
    names = names_by_kind(setting)
    backends = {kind: _resolve(names[kind], sequences[kind], device) for kind in sequences}
    return Backends(**backends)


def choose_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    head_width: int,
    *,
    length: int | None = None,
) -> Backend:
    """Resolve the name of a backend for this kind of tensors; ``length`` of rows, if they are.

    Raises:
        ValueError: as ``attention``.
    """
    sequences = Sequences(dtype, head_width, length=length, packed=length is None)
    return _resolve(backend, sequences, device)


def _resolve(name: str, sequences: Sequences, device: torch.device) -> Backend:
    if device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        sequences = replace(sequences, autocast=True)
    # Meta tensors stand for tensors on a GPU, and take no memory of it.
    like = torch.empty(0, dtype=sequences.dtype, device="meta" if device.type in GPUS else device)
    if chosen("short_rows", like):
        sequences = replace(sequences, short_rows=True)
    if device.type == "cuda":
        sequences = replace(sequences, refused=_refused_of(sequences.kind))
    return _choose(name, sequences, device, torch.are_deterministic_algorithms_enabled())


def _refused_of(kind: str | None) -> frozenset[str]:
    """Of a kind of attention; of a call that names none, of any kind."""
    return _refused.get(kind, frozenset()) if kind else frozenset().union(*_refused.values())


@cache
def _choose(name: str, sequences: Sequences, device: torch.device, deterministic: bool) -> Backend:
    if device.type == "meta" and name in ("flash", "flash3", "cudnn"):
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
    logger.info("%s: %s", LABELS[kind] if kind else "attention backend", choice)


def _attend_rows(backend: Backend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Kernels refuse the empty tensors of ranks without tokens.
    if backend.name == "reference" or not q.numel():
        return _explicit(q, k, v)
    if k.shape[1] == 1:
        # One key has all the weight. Kernels would fill a tile of 64 or 128 queries for each row.
        return v if q is v else with_zero_gradients(v.expand(q.shape).contiguous(), q, k)

    if backend.name == "short_rows":
        return attend_short_rows(q, k, v)

    if backend.name == "flash3":
        return _flash_3_rows(backend.deterministic, q, k, v)

    return _in_parts(_rows_kernel(backend), q, k, v)


def _in_parts(kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By calls of at most ``MAX_ROWS`` rows."""
    if len(q) <= MAX_ROWS:
        # The backward of a split is a copy.
        return kernel(q, k, v)
    parts = zip(*(z.split(MAX_ROWS) for z in (q, k, v)), strict=True)
    return torch.cat([kernel(*part) for part in parts])


def _rows_kernel(backend: Backend) -> Callable[..., Tensor]:
    """The kernel for rows ``[R, L, H, D]``."""
    if backend.name == "flash":
        return _flash_attn("flash_attn_func", backend)
    return partial(_sdpa_rows, backend.name)


def _varlen_kernel(backend: Backend, q: Tensor) -> Kernel | None:
    """A kernel for packed tokens with the arguments of ``flash``, if there is one."""
    if backend.name == "flash":
        return _flash_attn("flash_attn_varlen_func", backend)
    if backend.name == "flash3":
        return partial(_flash_attn_3, "flash_attn_varlen_func", backend.deterministic)
    return torch_varlen_kernel(backend.name, q)


def torch_varlen_kernel(name: str, q: Tensor) -> Kernel | None:
    """The kernel of torch for packed tokens that stands for a name in ``KERNELS``, if there is one.

    FlashAttention-2 where it takes such queries, which autocast may have cast, or the
    memory-efficient one.
    """
    if name == "reference" or q.device.type not in GPUS:
        return None
    return _torch_varlen_kernel(name, Sequences(q.dtype, q.shape[-1]), q.device)


# Each block asks, and looking for packages takes longer than many kernels.
@cache
def _torch_varlen_kernel(name: str, sequences: Sequences, device: torch.device) -> Kernel | None:
    platform = Platform.of(device, deterministic=False)
    if name != "efficient" and obstacle("torch_flash", sequences, platform) is None:
        return flash if available("_flash_attention_forward") else None
    if obstacle("efficient", sequences, platform) is None:
        return efficient if available("_efficient_attention_forward") else None
    return None


def _flash_attn(function: str, backend: Backend) -> Callable[..., Tensor]:
    import flash_attn

    # The functions have this option since 2.4.1 only.
    options = {"deterministic": True} if backend.deterministic else {}
    return partial(getattr(flash_attn, function), **options)


def _flash_3_rows(deterministic: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _in_parts(partial(_flash_attn_3, "flash_attn_func", deterministic), q, k, v)


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
        out = _traced_sdpa(name, q, k, v)
    else:
        out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2)


def _traced_sdpa(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operator that SDPA calls on a GPU; of meta tensors it would trace matrices of scores."""
    aten = torch.ops.aten
    if name != "efficient" and q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v)[0]
    keep_sums = torch.is_grad_enabled()
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, keep_sums)[0]


def _pinned_sdpa(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # torch takes the next one where it knows that cuDNN cannot take a call.
    options: dict[str, Any] = {"set_priority": True} if name == "cudnn" else {}
    with sdpa_kernel(_sdpa_backends(name), **options):
        return F.scaled_dot_product_attention(q, k, v)


def _sdpa_backends(name: str) -> list[SDPBackend]:
    """Backends that are correct, build no matrix of scores and, if asked for, are deterministic."""
    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    if name == "torch_flash":
        return [flash]
    if name == "efficient":
        return [efficient]

    cudnn_is_safe = (torch.backends.cudnn.version() or 0) >= SAFE_CUDNN
    is_refused = "cudnn" in _refused_of(None)
    if torch.are_deterministic_algorithms_enabled() or is_refused or not cudnn_is_safe:
        return [flash, efficient]
    return [SDPBackend.CUDNN_ATTENTION, flash, efficient]


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
