"""The peak of live tensor bytes, counted by storage; of tensors alone, or as CUDA allocates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import opensora_sp.parallel.collectives  # noqa: F401 (registers the operator of exchanges)
from opensora_sp.models.attention import PROCESSORS, traced_sdpa


class LivePeak(TorchDispatchMode):
    """Counts the bytes of storages that torch operations allocate inside this context.

    A storage counts once, whatever the number of its views, from the operation that returns it
    until its last tensor is freed, also after the context. Tensors that existed before do not
    count. Works on CPU, on CUDA and with fake tensors, in forward and backward. Not counted:
    temporary memory inside an operation, and the allocator's rounding and fragmentation.

    ``live``, ``peak`` and ``largest`` (0 here) are bytes. Trackers may be nested; each has its own
    count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        # By address of the storage.
        self._bytes: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self.peak = self.live

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        if _allocates(func):
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._note(tensor, func, (args, kwargs))

        self.peak = max(self.peak, self.live + self.workspace_of(func, args, result))
        return result

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """Bytes of a storage."""
        return storage.nbytes()

    def workspace_of(self, func: Any, args: tuple[Any, ...], result: Any) -> int:
        """Bytes of temporary memory inside an operation, which are not counted here."""
        return 0

    def _note(self, tensor: Tensor, func: Any, inputs: Any) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage._cdata, self.size_of(storage)
        known = address in self._bytes

        # A tensor that existed before, or a view of it. lift_fresh returns the new tensor of
        # torch.tensor, which is its input.
        is_lifted = func is torch.ops.aten.lift_fresh.default
        if not known and not is_lifted and _shares(storage, inputs):
            return

        # A known storage may have been resized.
        self.live += num_bytes - self._bytes.get(address, 0)
        self._bytes[address] = num_bytes
        if not known:
            weakref.finalize(storage, self._freed, address)

    def _freed(self, address: int) -> None:
        self.live -= self._bytes.pop(address)


@cache
def _allocates(func: Any) -> bool:
    """True if an operation may return new memory; most operations return views, which do not."""
    if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.resize_.default):
        return True
    returns = func._schema.returns
    aliases = [returned.alias_info for returned in returns]
    return not aliases or not all(alias and not alias.is_write for alias in aliases)


def _shares(storage: torch.UntypedStorage, inputs: Any) -> bool:
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return any(tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors)


# How CUDA differs from the sum of all tensors, which is known here alone:
#
# * the caching allocator rounds each storage up to ``BLOCK`` bytes;
# * attention is the operator that a GPU takes (``models/attention.py``: meta tensors stand for a
#   GPU's);
# * kernels take workspaces, which no tensor shows: ``WORKSPACES`` has a rule for each operator with
#   a large one;
# * cuBLAS keeps ``CUBLAS_WORKSPACE`` bytes for each thread that multiplies: one runs forward,
#   another backward.
#
# The rules hold for torch 2.14 (FlashAttention-2: ``mha_fwd`` and ``mha_bwd`` in ``flash_api.cpp``;
# memory-efficient attention: ``kernel_backward.h``), and tests/cuda/test_planner_cuda.py compares
# them with torch's allocator. Legend: R rows, L tokens of a row, H heads, D head width.


aten = torch.ops.aten
BLOCK = 512
CUBLAS_WORKSPACE = 32 * 1024**2  # of compute capability 9.0; 8 MB before
FP32 = 4
THREADS_OF_SM, SUMS_OF_THREAD = 2048, 128  # of a multiprocessor; of a thread that sums


class AllocatorPeak(LivePeak):
    """Counts the bytes that torch's caching allocator would allocate for meta tensors.

    ``largest`` are the bytes of the largest block: it has to lie in one piece, so that as much can
    be free without being of use.
    """

    def size_of(self, storage: torch.UntypedStorage) -> int:
        size = rounded(storage.nbytes(), BLOCK) if storage.device.type == "meta" else 0
        self.largest = max(self.largest, size)
        return size

    def workspace_of(self, func: Any, args: tuple[Any, ...], result: Any) -> int:
        rule = WORKSPACES.get(func)
        workspace = rule(args, result) if rule else 0
        self.largest = max(self.largest, workspace)
        return workspace


torch_attention = F.scaled_dot_product_attention


def fused_attention(device: str) -> Any:
    """A context in which attention of meta tensors is the fused kernel of "cuda" or "cpu".

    torch takes its mathematical definition there, whose scores no device would keep.
    """
    # Replaced, not caught by a mode, which calls of ``backward`` leave.
    return mock.patch.object(F, "scaled_dot_product_attention", partial(_attend_fused, device))


def _attend_fused(
    device: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **options: Any
) -> Tensor:
    if attn_mask is not None:
        return torch_attention(query, key, value, attn_mask, **options)
    if device == "cuda":
        return traced_sdpa(query, key, value)
    out: Tensor = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
    return out


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

    Where a block of threads would add up too many numbers, several share them, up to as many as the
    GPU runs at a time, and torch keeps room for the partial sums of all their threads. This is
    ``setReduceConfig`` in ``Reduce.cuh`` for widths that are multiples of 128, within 2 %.
    """
    terms = args[0]
    if not summed.numel() or terms.shape[-1] != summed.shape[-1] or not terms.is_contiguous():
        return 0
    count = terms.numel()
    if count < 1024 * summed.numel():
        return 0
    # A thread adds up 16 numbers or more for a sum, and at most 256.
    at_once = min(PROCESSORS * THREADS_OF_SM * SUMS_OF_THREAD, 2 * count)
    return rounded(FP32 * max(at_once, count // 8), BLOCK)


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
    aten._scaled_dot_product_efficient_attention_backward.default: (
        lambda args, _: _efficient(*args[1].shape)
    ),
    aten._flash_attention_backward.default: _flash_varlen_backward,
    aten._efficient_attention_backward.default: _efficient_varlen_backward,
    aten.sum.dim_IntList: _column_sums,
    torch.ops.opensora_sp.exchange.default: _exchange,
}
