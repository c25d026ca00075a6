"""What the operators of a pass compute and move, by kind, counted on meta tensors.

``OperatorCounter`` sees each operator that torch runs, in forward, recomputation and backward. It
adds up FLOPs, bytes of memory traffic (each tensor is read or written once; views and expanded
dimensions cost nothing), and the number of operators, which on a GPU are about as many launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora_sp.models.layers import CrossAttention, SelfAttention
from opensora_sp.parallel.cost_model import CostModel

aten = torch.ops.aten
PRODUCTS = "matrix products"
ELEMENTWISE = "norms, elementwise, copies"
SPATIAL, TEMPORAL, CROSS = "spatial attention", "temporal attention", "cross-attention"

MATRIX_OPERATORS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
# Which of an attention operator's arguments are queries and keys.
ATTENTION_FORWARD = {
    aten._scaled_dot_product_flash_attention: (0, 1),
    aten._scaled_dot_product_efficient_attention: (0, 1),
    aten._flash_attention_forward: (0, 1),
    aten._efficient_attention_forward: (0, 1),
}
ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward: (1, 2),
    aten._scaled_dot_product_efficient_attention_backward: (1, 2),
    aten._flash_attention_backward: (1, 2),
    aten._efficient_attention_backward: (1, 2),
}
# They read as much of their first argument as they return.
GATHERS = (aten.index_select, aten.index, aten.gather, aten.embedding)
# They write their first argument without reading it.
OVERWRITES = (aten.fill_, aten.zero_, aten.copy_, aten.index_copy_)
ALLOCATIONS = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.set_)


@dataclass
class Work:
    """Of one kind of operator: FLOPs, bytes moved, operators, and seconds of a GPU."""

    flops: float = 0.0
    bytes: float = 0.0
    operators: float = 0.0
    seconds: float = 0.0

    def add(self, flops: float, num_bytes: float, seconds: float) -> None:
        self.flops += flops
        self.bytes += num_bytes
        self.operators += 1
        self.seconds += seconds

    def plus(self, other: Work, times: float) -> Work:
        """This work and ``times`` the other one."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Work(*(own + times * added for own, added in pairs))


class OperatorCounter(TorchDispatchMode):
    """Counts the operators inside of this context, by kind, as a GPU would run them.

    Attention is distinguished by the module that calls it; its backward by the shapes of forward.
    """

    def __init__(self, gpu: CostModel) -> None:
        super().__init__()
        self.gpu = gpu
        self.work: dict[str, Work] = {}
        self._calling = ELEMENTWISE
        self._attention_of: dict[tuple[Any, ...], str] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Distinguish spatial, temporal and cross-attention of this model."""
        hooks = []
        for name, module in model.named_modules():
            kind = _attention_kind(name, module)
            if kind is not None:
                hooks.append(module.register_forward_pre_hook(partial(self._called, kind)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _called(self, kind: str, *_: Any) -> None:
        self._calling = kind

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator not in ALLOCATIONS and not _returns_views(func):
            self._count(operator, args, result)
        return result

    def _count(self, operator: Any, args: tuple[Any, ...], result: Any) -> None:
        moved = _bytes_moved(operator, args, result)
        kind, flops, seconds = ELEMENTWISE, 0.0, 0.0

        if operator in MATRIX_OPERATORS:
            kind, flops = PRODUCTS, _product_flops(args, result)
            seconds = flops / self.gpu.flops
        elif operator in ATTENTION_FORWARD or operator in ATTENTION_BACKWARD:
            kind, attention = self._attention(operator, args)
            flops, seconds = attention.flops, attention.seconds(self.gpu)

        seconds = max(seconds, moved / self.gpu.memory_bandwidth, self.gpu.shortest_kernel)
        self.work.setdefault(kind, Work()).add(flops, moved, seconds)

    def _attention(self, operator: Any, args: tuple[Any, ...]) -> tuple[str, AttentionCall]:
        backward = operator in ATTENTION_BACKWARD
        places = (ATTENTION_BACKWARD if backward else ATTENTION_FORWARD)[operator]
        shapes = tuple(tuple(args[place].shape) for place in places)
        if not backward:
            self._attention_of[shapes] = self._calling
        packed = "_scaled_dot_product" not in operator.__name__
        kind = self._attention_of.get(shapes, self._calling)
        return kind, AttentionCall.of(args, places, packed=packed, backward=backward)


@dataclass(frozen=True)
class AttentionCall:
    """One call of FlashAttention-2: ``rows`` of ``queries`` x ``keys``, ``heads`` of ``width``."""

    rows: int
    queries: int
    keys: int
    heads: int
    width: int
    backward: bool

    @classmethod
    def of(
        cls, args: tuple[Any, ...], places: tuple[int, int], *, packed: bool, backward: bool
    ) -> AttentionCall:
        """From an operator's arguments; packed rows count as rows of their mean lengths."""
        q, k = (args[place] for place in places)
        if not packed:
            rows, heads, queries, width = q.shape
            return cls(rows, queries, k.shape[2], heads, width, backward)

        *_, tokens, heads, width = q.shape
        offsets = next(one for one in args if isinstance(one, Tensor) and one.dtype == torch.int32)
        rows = max(1, len(offsets) - 1)
        return cls(rows, -(-tokens // rows), -(-k.shape[-3] // rows), heads, width, backward)

    @property
    def flops(self) -> float:
        """Of the scores and the weighted sum; backward also recomputes the scores."""
        forward = 4.0 * self.rows * self.heads * self.queries * self.keys * self.width
        return 2.5 * forward if self.backward else forward

    def seconds(self, gpu: CostModel) -> float:
        """Of the whole call."""
        rows = self.rows * self.heads
        return gpu.attention(rows, self.queries, self.keys, self.width, backward=self.backward)


def _attention_kind(name: str, module: nn.Module) -> str | None:
    if isinstance(module, CrossAttention):
        return CROSS
    if not isinstance(module, SelfAttention):
        return None
    # STDiT3 has blocks of either kind; a block of STDiT and STDiT2 has one attention of each.
    return TEMPORAL if "temporal_blocks" in name or name.endswith("attn_temp") else SPATIAL


def _product_flops(args: tuple[Any, ...], result: Tensor) -> float:
    """Two for each number of the result and each term of its sum."""
    matrices = [one for one in args if isinstance(one, Tensor)]
    return 2.0 * result.numel() * matrices[-1].shape[-2]


def _bytes_moved(operator: Any, args: tuple[Any, ...], result: Any) -> float:
    """Bytes of the distinct tensors that an operator reads and writes."""
    written = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
    read = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
    if operator in GATHERS:
        read[0] = written[0]
    elif operator is aten.index_copy_:
        read, written = read[1:], read[2:]
    elif operator in OVERWRITES:
        read = read[1:]

    distinct = {_memory_of(one): one for one in read}
    return float(sum(map(_bytes_of, (*distinct.values(), *written))))


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


def _bytes_of(tensor: Tensor) -> int:
    """Bytes of the numbers a tensor holds; an expanded dimension repeats them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


@cache
def _returns_views(func: Callable[..., Any]) -> bool:
    returns = func._schema.returns  # type: ignore[attr-defined]
    aliases = [one.alias_info for one in returns]
    return bool(aliases) and all(alias and not alias.is_write for alias in aliases)
