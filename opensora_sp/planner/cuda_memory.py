"""Memory that torch allocates on a GPU, counted on meta tensors, which hold no data.

This is the one place that knows how CUDA differs from the sum of all tensors:

* the caching allocator rounds each storage up to ``BLOCK`` bytes;
* attention is the operator that a GPU takes (``models/attention.py``: meta tensors stand for a
  GPU's);
* kernels take workspaces, which no tensor shows: ``WORKSPACES`` has a rule for each operator with
  a large one;
* cuBLAS keeps ``CUBLAS_WORKSPACE`` bytes for each thread that multiplies: one runs forward,
  another backward.

The rules hold for torch 2.14 (FlashAttention-2: ``mha_fwd`` and ``mha_bwd`` in
``flash_api.cpp``; memory-efficient attention: ``kernel_backward.h``).
``tests/cuda/test_planner_cuda.py`` compares them with torch's allocator.

Legend: R rows, L tokens of a row, H heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import opensora_sp.parallel.collectives  # noqa: F401 (registers the operator of exchanges)
from opensora_sp.models.attention import PROCESSORS

from .live_peak import LivePeak

aten = torch.ops.aten
BLOCK = 512
CUBLAS_WORKSPACE = 32 * 1024**2  # of compute capability 9.0; 8 MB before
FP32 = 4
THREADS_OF_SM, THREADS_OF_SUM = 2048, 512  # of a multiprocessor, and of a block that sums


class AllocatorPeak(LivePeak):
    """Counts the bytes that torch's caching allocator would allocate for meta tensors.

    ``largest`` are the bytes of the largest block: it has to lie in one piece, so that as much can
    be free without being of use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def size_of(self, storage: torch.UntypedStorage) -> int:
        size = rounded(storage.nbytes(), BLOCK) if storage.device.type == "meta" else 0
        self.largest = max(self.largest, size)
        return size

    def workspace_of(self, func: Any, args: tuple[Any, ...], result: Any) -> int:
        rule = WORKSPACES.get(func)
        workspace = rule(args, result) if rule else 0
        self.largest = max(self.largest, workspace)
        return workspace


def rounded(number: int, unit: int) -> int:
    """``number``, up to the next multiple of ``unit``."""
    return -(-number // unit) * unit


def _flash_backward(args: tuple[Any, ...], _: Any) -> int:
    rows, heads, length, width = args[1].shape
    padded = rows * rounded(length, 128)
    return _flash(padded, padded, heads, width) + _copies(args[0], args[4])


def _flash_varlen_backward(args: tuple[Any, ...], _: Any) -> int:
    tokens, heads, width = args[1].shape
    rows, longest = len(args[6]) - 1, args[8]
    return _flash(tokens + 128 * rows, rows * rounded(longest, 128), heads, width)


def _flash(queries: int, products: int, heads: int, width: int) -> int:
    """Gradients of queries are added up in fp32, in rows and heads padded to tiles; so are the
    products of the output with its gradient. Packed rows share the padding of the queries."""
    accumulated = queries * heads * rounded(width, 32 if width <= 128 else 64) * FP32
    return rounded(accumulated, BLOCK) + rounded(products * heads * FP32, BLOCK)


def _exchange(args: tuple[Any, ...], _: Any) -> int:
    """An exchange holds tokens once more: packed by receiver, and then as they arrive."""
    tokens, _, _, sent, received = args[:5]
    token = tokens.shape[1:].numel() * tokens.element_size()
    return rounded(max(sum(sent), sum(received)) * token, BLOCK)


def _efficient_backward(args: tuple[Any, ...], _: Any) -> int:
    return _efficient(*args[1].shape)


def _efficient_varlen_backward(args: tuple[Any, ...], _: Any) -> int:
    _, _, heads, width = args[1].shape
    rows, longest = len(args[6]) - 1, args[8]
    return _efficient(rows, heads, longest, width)


def _efficient(rows: int, heads: int, length: int, width: int) -> int:
    """In fp32: blocks of threads that share queries hand their sums on through tiles of 64
    columns, each with a lock; and the products of the output with its gradient. (In 16 bits torch
    takes FlashAttention.)"""
    queries = 64 if width <= 64 else 128
    tiles = -(-length // queries) * -(-width // 64) * (queries * 64 * FP32 + 16)
    return rounded(rows * heads * tiles, BLOCK) + rounded(rows * heads * length * FP32, BLOCK)


def _column_sums(args: tuple[Any, ...], summed: Tensor) -> int:
    """Sums over tokens, such as of a bias's gradient.

    Where one block of threads would add up too many numbers, several share them, and torch keeps
    room for the partial sums of all their threads (``setReduceConfig`` in ``Reduce.cuh``).
    """
    terms = args[0]
    if not summed.numel() or terms.shape[-1] != summed.shape[-1] or not terms.is_contiguous():
        return 0
    outputs, inputs = summed.numel(), terms.numel() // summed.numel()
    vector = math.gcd(summed.shape[-1], 4)
    threads = THREADS_OF_SUM // vector
    width = min(_power_of_2(outputs // vector), threads, 32)
    height = min(_power_of_2(inputs), threads, threads // width)
    width = min(_power_of_2(outputs // vector), threads // height)

    shares_inputs = inputs >= min(16 * height, 256)
    per_thread = -(-inputs // height) if shares_inputs else inputs
    columns = width if shares_inputs else width * height
    grid = -(-(outputs // vector) // columns)
    wanted = PROCESSORS * (THREADS_OF_SM // (width * height))
    if not shares_inputs or per_thread < 256 or grid > wanted:
        return 0
    blocks = max(min(-(-wanted // grid), -(-per_thread // 16)), -(-per_thread // 256))
    return FP32 * outputs * blocks * width * vector if blocks > 1 else 0


def _power_of_2(number: int) -> int:
    """The largest that is not larger."""
    return 1 << max(number, 1).bit_length() - 1


def _copies(*tensors: Tensor) -> int:
    """Of gradient and output ``[R, H, L, D]``, which the kernel takes with the heads inside,
    without gaps."""
    return sum(
        rounded(tensor.nbytes, BLOCK)
        for tensor in tensors
        if not tensor.transpose(1, 2).is_contiguous()
    )


WORKSPACES: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._flash_attention_backward.default: _flash_varlen_backward,
    aten._efficient_attention_backward.default: _efficient_varlen_backward,
    aten.sum.dim_IntList: _column_sums,
    torch.ops.opensora_sp.exchange.default: _exchange,
}
