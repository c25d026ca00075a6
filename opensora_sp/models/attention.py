"""Attention, behind one function.

``attention`` takes rows of equal length (self-attention over the rows of a layout) or packed tokens
with lengths (cross-attention to texts of different lengths). No mask tensor is ever built, so no
tensor is quadratic in a length.

It has three backends, chosen by name or by what the tensors allow (``choose_backend``):

* ``flash``: FlashAttention-2 (Dao, 2023) of the flash-attn 2.x package;
* ``sdpa``: torch's scaled dot product attention and, for packed tokens on CUDA, the kernels below
  it (``varlen.py``);
* ``reference``: an explicit softmax in at least float32, a bounded number of scores at a time.

Legend: R rows, L tokens of a row, N packed tokens, H heads, D head width, P pieces of samples.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from . import varlen
from .compile import uncompiled
from .functions import with_zero_gradients
from .packed_attention import attend_packed, concat
from .packing import MAX_ROWS, Lengths, Packing

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "flash", "sdpa", "reference")
NAMES = {"flash": "flash-attn", "sdpa": "torch SDPA", "reference": "explicit softmax"}
MAX_SCORES = 2**22  # numbers in one tensor of the reference: 16 MB in float32
GPUS = ("cuda", "meta")  # on meta tensors the planner traces the calls of a recent GPU
PROCESSORS = 132  # of such a GPU, an H100 or H200
DATA_CENTER_GPUS = ((8, 0), (9, 0))  # compute capabilities of A100 and H100
SAFE_CUDNN = 91501  # older ones are wrong if 128 does not divide a length (pytorch#169849)


@dataclass(frozen=True)
class Backend:
    """The backend for one kind of tensors; ``choose_backend`` resolves a name to it.

    Args:
        name: "flash", "sdpa" or "reference".
        processors: multiprocessors of the device. Packed queries are cut into pieces for them.
        deterministic: gradients of queries are summed without atomics
            (``torch.use_deterministic_algorithms``).
    """

    name: str
    processors: int = 1
    deterministic: bool = False


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
            share what is copied to the device.
        backend: "auto", "flash", "sdpa" or "reference", or a result of ``choose_backend``.
            Compiled code passes the latter, since the choice is no part of a graph.

    Returns:
        A tensor shaped like ``q``; of packed tokens in the dtype of ``v``.

    Raises:
        ValueError: for an unknown backend, or for "flash" where it cannot run.
    """
    if isinstance(backend, str):
        backend = choose_backend(backend, q.device, q.dtype, q.shape[-1])
    if lengths is None:
        return _attend_rows(backend, q, k, v)
    if torch.compiler.is_compiling() and isinstance(lengths, Packing):
        return _attend_in_graph(backend, q, k, v, lengths)
    return attend_packed(
        q,
        k,
        v,
        lengths,
        attend_rows=partial(_attend_rows, backend),
        kernel_for=partial(_varlen_kernel, backend),
        processors=backend.processors,
    )


def _attend_in_graph(backend: Backend, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    """Attention of packed samples as one node of a graph, by ``packed_operator.py``."""
    # Under autocast, norms leave queries and keys wider than values, which no kernel takes.
    q, k = q.to(v.dtype), k.to(v.dtype)
    operator = torch.ops.opensora_sp.packed_attention
    return operator(q, k, v, packing.lengths, backend.name, backend.processors)[0]


def check_backend(backend: str) -> None:
    """Raise ValueError for a name that is none of ``BACKENDS``."""
    if backend not in BACKENDS:
        raise ValueError(
            f"got attention {backend!r}; expected one of {BACKENDS}; choose one of these"
        )


@uncompiled  # looks up packages and devices, and logs: models resolve it before their blocks
def choose_backend(
    backend: str, device: torch.device, dtype: torch.dtype, head_width: int
) -> Backend:
    """Resolve the name of a backend for this kind of tensors. Logs the reason, once for each kind.

    Raises:
        ValueError: as ``attention``.
    """
    return _choose(backend, device, dtype, head_width, torch.are_deterministic_algorithms_enabled())


@cache
def _choose(
    backend: str, device: torch.device, dtype: torch.dtype, head_width: int, deterministic: bool
) -> Backend:
    check_backend(backend)
    if backend in ("auto", "flash") and device.type == "meta":
        backend = "sdpa"  # torch's own kernels, which allocate the same

    chosen, reason = backend, "asked for"
    if backend in ("auto", "flash"):
        obstacle = _flash_obstacle(device, dtype, head_width, deterministic)
        if backend == "flash" and obstacle:
            raise ValueError(
                f"got attention 'flash', but {obstacle}; expected flash-attn 2.x and fp16 or bf16 "
                "tensors on a GPU of compute capability 8.0 or more; install it or change the "
                "precision, or set attention='auto'"
            )
        chosen, reason = ("sdpa", obstacle) if obstacle else ("flash", "flash-attn is installed")
    if chosen == "sdpa" and (obstacle := _sdpa_obstacle(device, dtype, head_width)):
        chosen, reason = "reference", obstacle
    logger.info("attention backend: %s (%s)", NAMES[chosen], reason)

    processors = PROCESSORS if device.type == "meta" else 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Backend(chosen, processors, deterministic)


def _flash_obstacle(
    device: torch.device, dtype: torch.dtype, head_width: int, deterministic: bool
) -> str | None:
    """Why flash-attn cannot take such tensors; None if it can."""
    if obstacle := _flash_kernels_obstacle(device, dtype, head_width):
        return obstacle
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    from flash_attn import flash_attn_func

    if deterministic and "deterministic" not in inspect.signature(flash_attn_func).parameters:
        return "this flash-attn has no deterministic backward (2.4.1 and later have)"
    return None


def _flash_kernels_obstacle(
    device: torch.device, dtype: torch.dtype, head_width: int
) -> str | None:
    """Why no kernels of FlashAttention can take such tensors, of flash-attn or torch."""
    if device.type not in GPUS:
        return "the tensors are not on a GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not fp16 or bf16"
    if head_width > 256:
        return f"a head is {head_width} wide, over 256"
    if _is_old(device):
        return "the GPU's compute capability is below 8.0"
    return None


def _sdpa_obstacle(device: torch.device, dtype: torch.dtype, head_width: int) -> str | None:
    """Why torch would build whole matrices of scores for such tensors; None if it would not."""
    if device.type not in GPUS:
        return None
    if dtype == torch.float64:
        return "torch has no fused kernel for float64 on a GPU"
    if head_width * dtype.itemsize % 16:
        return (
            f"torch's fused kernels take heads in multiples of 16 bytes, not {head_width} x {dtype}"
        )
    if dtype == torch.bfloat16 and _is_old(device):
        return "torch's fused kernels take bf16 from compute capability 8.0 on"
    return None


def _is_old(device: torch.device) -> bool:
    """Whether a GPU is older than Ampere."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def _attend_rows(backend: Backend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Kernels refuse the empty tensors of ranks without tokens.
    if backend.name == "reference" or not q.numel():
        return _explicit(q, k, v)
    if k.shape[1] == 1:
        # One key has all the weight. Kernels would fill a tile of 64 or 128 queries for each row.
        return v if q is v else with_zero_gradients(v.expand(q.shape).contiguous(), q, k)

    kernel = _flash_attn("flash_attn_func", backend) if backend.name == "flash" else _sdpa_rows
    parts = zip(*(z.split(MAX_ROWS) for z in (q, k, v)), strict=True)
    return concat([kernel(*part) for part in parts])


def _varlen_kernel(backend: Backend, q: Tensor) -> varlen.Kernel | None:
    """A kernel for packed tokens with the arguments of ``varlen.flash``, if there is one."""
    if backend.name == "flash":
        return _flash_attn("flash_attn_varlen_func", backend)
    if backend.name == "reference" or q.device.type not in GPUS:
        return None

    # FlashAttention-2's backward takes wide heads on data-center GPUs only.
    head_width = q.shape[-1]
    takes_width = head_width <= 192 or (
        q.is_cuda and torch.cuda.get_device_capability(q.device) in DATA_CENTER_GPUS
    )
    if takes_width and not _flash_kernels_obstacle(q.device, q.dtype, head_width):
        return varlen.flash if varlen.available("_flash_attention_forward") else None
    return varlen.efficient if varlen.available("_efficient_attention_forward") else None


def _flash_attn(function: str, backend: Backend) -> Callable[..., Tensor]:
    import flash_attn

    # The functions have this option since 2.4.1 only.
    options = {"deterministic": True} if backend.deterministic else {}
    return partial(getattr(flash_attn, function), **options)


def _sdpa_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (z.transpose(1, 2) for z in (q, k, v))  # [R, H, L, D]
    if q.is_cuda:
        out = _pinned_sdpa(q, k, v)
    elif q.is_meta:
        out = _traced_sdpa(q, k, v)
    else:
        out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2)


def _traced_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operator that SDPA calls on a GPU; of meta tensors it would trace matrices of scores."""
    aten = torch.ops.aten
    if q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v)[0]
    keep_sums = torch.is_grad_enabled()
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, keep_sums)[0]


# One node of the graph: torch 2.5 cannot trace the context manager, which acts while it is lowered.
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _pinned_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(_sdpa_backends()):
        return F.scaled_dot_product_attention(q, k, v)


def _sdpa_backends() -> list[SDPBackend]:
    """Those that are correct, build no matrix of scores and, where asked for, are deterministic."""
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if torch.are_deterministic_algorithms_enabled():
        return fused
    cudnn_is_safe = (torch.backends.cudnn.version() or 0) >= SAFE_CUDNN
    return [*fused, SDPBackend.CUDNN_ATTENTION] if cudnn_is_safe else fused


def _explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, at most ``MAX_SCORES`` scores at a time, which backward computes again."""
    _, num_queries, num_heads, _ = q.shape
    of_query = num_heads * k.shape[1]
    if len(q) * num_queries * of_query <= MAX_SCORES:
        return _softmax(q, k, v)

    # The gradients of all chunks of queries are added to keys and values: not in 16 bits.
    k, v = (z.to(torch.promote_types(z.dtype, torch.float32)) for z in (k, v))
    rows, queries = max(1, MAX_SCORES // (num_queries * of_query)), max(1, MAX_SCORES // of_query)
    attend = partial(checkpoint, _softmax, use_reentrant=False, preserve_rng_state=False)
    out = []
    for q_rows, k_rows, v_rows in zip(*(z.split(rows) for z in (q, k, v)), strict=True):
        parts = [attend(part, k_rows, v_rows) for part in q_rows.split(queries, dim=1)]
        out.append(torch.cat(parts, dim=1))
    return torch.cat(out)


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("rqhd,rkhd->rhqk", q.to(wide) * q.shape[-1] ** -0.5, k.to(wide))
    return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(dim=-1), v.to(wide)).to(q.dtype)
