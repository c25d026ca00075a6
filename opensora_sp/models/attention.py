"""Attention, behind one function.

``attention`` takes equal rows (self-attention over the rows of a layout) or packed tokens with lengths (cross-attention
to text of differing length). No mask tensor is ever built, so no tensor is quadratic in a length.

Behind it are three backends, chosen by name or by what the tensors allow (``choose_backend``):

* ``flash``: FlashAttention-2 (Dao, 2023) of the flash-attn 2.x package;
* ``sdpa``: torch's scaled dot product attention and, for packed tokens on CUDA, torch's own varlen attention;
* ``reference``: an explicit softmax in at least float32, a bounded number of scores at a time.

Legend: R rows, L tokens of a row, N packed tokens, n samples or rows packed one after the other, H heads, D head width.
"""

from __future__ import annotations

import importlib.util
import logging
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "flash", "sdpa", "reference")
MAX_ROWS = 65_535  # kernels count rows along an axis of CUDA's grid that ends here
MAX_SCORES = 2**22  # numbers in one tensor of the reference: 16 MB in float32
SAFE_CUDNN = 91501  # before 9.15.1 cuDNN is wrong for lengths that 128 does not divide (pytorch#169849)

Lengths = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Backend:
    """What computes attention on one kind of tensors; ``choose_backend`` resolves a name to it."""

    name: str  # "flash", "sdpa" or "reference"


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Lengths | None = None, backend: str | Backend = "auto"
) -> Tensor:
    """Softmax attention, ``softmax(q k^T / sqrt(D)) v``, per row or per packed sample.

    Args:
        q, k, v: ``[R, L, H, D]`` where every row attends within itself; with ``lengths`` packed tokens ``[N, H, D]``.
        lengths: (query lengths, key lengths) of each sample, host integers that sum to N of q and of k. A query
            length may be 0; a key length is at least 1.
        backend: "auto", "flash", "sdpa" or "reference", or what ``choose_backend`` made of it. Compiled code passes the
            latter, for the choice is no part of a graph.

    Returns:
        A tensor shaped like ``q``.

    Raises:
        ValueError: for an unknown backend, or for "flash" where it cannot run.
    """
    chosen: Backend
    chosen = choose_backend(backend, q.device, q.dtype, q.shape[-1]) if isinstance(backend, str) else backend
    if lengths is not None:
        return _attend_packed(chosen, q, k, v, *lengths)
    return _attend_rows(chosen, q, k, v)


def check_backend(backend: str) -> None:
    """Raise ValueError for a name that is none of ``BACKENDS``."""
    if backend not in BACKENDS:
        raise ValueError(f"got attention {backend!r}; expected one of {BACKENDS}; choose one of these")


@torch.compiler.disable  # asks for packages and devices, and logs: models resolve it before their blocks
def choose_backend(backend: str, device: torch.device, dtype: torch.dtype, head_width: int) -> Backend:
    """What ``backend`` stands for, for this kind of tensor. Logs the reason, once for each kind.

    Raises:
        ValueError: as ``attention``.
    """
    return _choose(backend, device, dtype, head_width)


@cache
def _choose(backend: str, device: torch.device, dtype: torch.dtype, head_width: int) -> Backend:
    check_backend(backend)
    chosen, reason = backend, "asked for"
    if backend in ("auto", "flash"):
        obstacle = _flash_obstacle(device, dtype, head_width)
        if backend == "flash" and obstacle:
            raise ValueError(
                f"got attention 'flash', but {obstacle}; expected flash-attn 2.x and fp16 or bf16 tensors on a GPU of "
                "compute capability 8.0 or more; install it or change the precision, or set attention='auto'"
            )
        chosen, reason = ("sdpa", obstacle) if obstacle else ("flash", "flash-attn is installed")
    if chosen == "sdpa" and (obstacle := _sdpa_obstacle(device, dtype, head_width)):
        chosen, reason = "reference", obstacle
    names = {"flash": "flash-attn", "sdpa": "torch SDPA", "reference": "explicit softmax"}
    logger.info("attention backend: %s (%s)", names[chosen], reason)
    return Backend(chosen)


def _flash_obstacle(device: torch.device, dtype: torch.dtype, head_width: int) -> str | None:
    """Why flash-attn cannot take such tensors; None if it can."""
    if obstacle := _flash_kernels_obstacle(device, dtype, head_width):
        return obstacle
    return None if importlib.util.find_spec("flash_attn") else "flash-attn is not installed"


def _flash_kernels_obstacle(device: torch.device, dtype: torch.dtype, head_width: int) -> str | None:
    """Why the kernels of FlashAttention, wherever they come from, cannot take such tensors."""
    if device.type != "cuda":
        return "the tensors are not on a GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not fp16 or bf16"
    if head_width > 256:
        return f"a head is {head_width} wide, over 256"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    return None


def _sdpa_obstacle(device: torch.device, dtype: torch.dtype, head_width: int) -> str | None:
    """Why torch would build whole matrices of scores for such tensors; None if it has a kernel that does not."""
    if device.type != "cuda":
        return None
    if dtype == torch.float64:
        return "torch has no fused kernel for float64 on a GPU"
    if head_width * dtype.itemsize % 16:
        return f"torch's fused kernels take heads in multiples of 16 bytes, not {head_width} x {dtype}"
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's fused kernels take bf16 from compute capability 8.0 on"
    return None


def _attend_rows(backend: Backend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if backend.name == "reference" or not q.numel():  # kernels refuse what ranks without tokens hold
        return _explicit(q, k, v)
    if k.shape[1] == 1:
        return _OneKey.apply(q, k, v)
    kernel = _flash_rows if backend.name == "flash" else _sdpa_rows
    if len(q) <= MAX_ROWS:
        return kernel(q, k, v)
    return torch.cat([kernel(*part) for part in zip(*(z.split(MAX_ROWS) for z in (q, k, v)), strict=True)])


@torch.compiler.disable  # lengths differ from batch to batch: compiled, each batch would be a graph of its own
def _attend_packed(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, q_lengths: Sequence[int], k_lengths: Sequence[int]
) -> Tensor:
    lengths = tuple(q_lengths), tuple(k_lengths)
    assert (len(q), len(k)) == (sum(lengths[0]), sum(lengths[1])), "lengths must add up to the tokens"
    kernel = _varlen_kernel(backend, q) if q.numel() else None
    if kernel is None or len(set(zip(*lengths, strict=True))) == 1:
        return _by_lengths(partial(_attend_rows, backend), q, k, v, *lengths)
    return _in_one_call(kernel, q, k, v, *lengths)


def _by_lengths(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, q_lengths: tuple[int, ...], k_lengths: tuple
) -> Tensor:
    """Samples of equal lengths share a call, wherever they lie."""
    runs = _runs(q_lengths, k_lengths)
    q_parts = q.split([n * q_len for n, q_len, _ in runs])
    k_parts, v_parts = (z.split([n * k_len for n, _, k_len in runs]) for z in (k, v))
    members = defaultdict(list)
    for i, (_, q_len, k_len) in enumerate(runs):
        members[q_len, k_len].append(i)
    out: list[Any] = [None] * len(runs)
    for (q_len, k_len), indices in members.items():
        n = sum(runs[i][0] for i in indices)
        rows = attend(
            _joined([q_parts[i] for i in indices]).unflatten(0, (n, q_len)),
            _joined([k_parts[i] for i in indices]).unflatten(0, (n, k_len)),
            _joined([v_parts[i] for i in indices]).unflatten(0, (n, k_len)),
        )
        for i, part in zip(indices, rows.split([runs[i][0] for i in indices]), strict=True):
            out[i] = part.flatten(0, 1)
    return _joined(out)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@lru_cache(maxsize=64)  # the blocks of a model ask alike, perhaps for thousands of rows
def _runs(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Neighbours of equal lengths: (how many, query length, key length)."""
    pairs = groupby(zip(q_lengths, k_lengths, strict=True))
    return [(len(list(same)), q_len, k_len) for (q_len, k_len), same in pairs]


def _in_one_call(
    kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, q_lengths: tuple, k_lengths: tuple
) -> Tensor:
    """All samples in one call of a kernel that is told where each begins, ``MAX_ROWS`` of them at a time."""
    q_chunks, k_chunks = (list(_chunks(one, MAX_ROWS)) for one in (q_lengths, k_lengths))
    q_parts = q.split([sum(chunk) for chunk in q_chunks])
    k_parts, v_parts = (z.split([sum(chunk) for chunk in k_chunks]) for z in (k, v))
    out = []
    for *tensors, q_chunk, k_chunk in zip(q_parts, k_parts, v_parts, q_chunks, k_chunks, strict=True):
        if sum(q_chunk):
            edges = (_edges(chunk, q.device) for chunk in (q_chunk, k_chunk))
            out.append(kernel(*tensors, *edges, max(q_chunk), max(k_chunk)))
    return _joined(out)


def _chunks(values: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    return (values[i : i + size] for i in range(0, len(values), size))


def _edges(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each sample begins, and the end: int32 ``[n + 1]``."""
    return torch.frombuffer(_sums(lengths), dtype=torch.int32).to(device)


@lru_cache(maxsize=64)
def _sums(lengths: tuple[int, ...]) -> array:
    return array("i", accumulate(lengths, initial=0))


def _varlen_kernel(backend: Backend, q: Tensor) -> Callable[..., Tensor] | None:
    """A kernel for packed tokens ``(q, k, v, q edges, k edges, longest q, longest k)``, if there is one."""
    if backend.name == "flash":
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func
    if backend.name == "sdpa" and not _flash_kernels_obstacle(q.device, q.dtype, q.shape[-1]):
        return _torch_varlen()
    return None


@cache
def _torch_varlen() -> Callable[..., Tensor] | None:
    """torch's own, from 2.10 on."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def _flash_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v)


def _sdpa_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (z.transpose(1, 2) for z in (q, k, v))  # [R, H, L, D]
    attend = _pinned_sdpa if q.is_cuda else F.scaled_dot_product_attention
    return attend(q, k, v).transpose(1, 2)


@torch.compiler.allow_in_graph  # one node: torch 2.5 cannot trace the context manager, which acts while it is lowered
def _pinned_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(_sdpa_backends()):
        return F.scaled_dot_product_attention(q, k, v)


def _sdpa_backends() -> list[SDPBackend]:
    """Those that are right and build no matrix of scores."""
    cudnn_is_safe = (torch.backends.cudnn.version() or 0) >= SAFE_CUDNN
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    return [*fused, SDPBackend.CUDNN_ATTENTION] if cudnn_is_safe else fused


class _OneKey(torch.autograd.Function):
    """One key takes all the weight, so the result is its value and queries and keys have no gradient.

    Forward repeats the values, backward sums over the queries. Images are such rows, one for each patch, for which
    kernels would fill a tile of 64 or 128 queries each.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.q_shape = q.shape
        return v.expand(q.shape).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_v = grad.sum(1, keepdim=True)
        return grad.new_zeros(ctx.q_shape), torch.zeros_like(grad_v), grad_v


def _explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, at most ``MAX_SCORES`` scores at a time; those are computed anew in backward."""
    _, num_queries, num_heads, _ = q.shape
    of_query = num_heads * k.shape[1]
    if len(q) * num_queries * of_query <= MAX_SCORES:
        return _softmax(q, k, v)
    rows, queries = max(1, MAX_SCORES // (num_queries * of_query)), max(1, MAX_SCORES // of_query)
    # The gradients of all chunks of queries are added to keys and values: not in 16 bits.
    k, v = (z.to(torch.promote_types(z.dtype, torch.float32)) for z in (k, v))
    out = []
    for q_rows, k_rows, v_rows in zip(*(z.split(rows) for z in (q, k, v)), strict=True):
        parts = (
            checkpoint(_softmax, part, k_rows, v_rows, use_reentrant=False, preserve_rng_state=False)
            for part in q_rows.split(queries, dim=1)
        )
        out.append(torch.cat(list(parts), dim=1))
    return torch.cat(out)


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("rqhd,rkhd->rhqk", q.to(wide) * q.shape[-1] ** -0.5, k.to(wide))
    return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(dim=-1), v.to(wide)).to(q.dtype)
