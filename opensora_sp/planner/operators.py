"""What the operators of a pass compute and move, by kind, counted on meta tensors.

``OperatorCounter`` sees each operator that torch runs, in forward, recomputation and backward. It
adds up FLOPs, bytes of memory traffic (each tensor is read or written once; views and expanded
dimensions cost nothing), and the number of operators, which on a GPU are about as many launches.
Triton kernels are operators as well; one that adds up gradients over tokens launches a second one.
For the host an operator of ours counts as many, since Python launches it.
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

MATRIX_OPERATORS = (aten.mm, aten.addmm, aten._addmm_activation, aten.bmm, aten.baddbmm)
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
# The host takes as long for the operator of a Triton kernel, which Python launches, as for so many
# of torch's: 100 us, and 9 us, where nothing is computed (the stub of ``tests/cuda``).
TRITON_LAUNCHES = 12
# The operators of Triton kernels whose names have this are attention.
SHORT_ROWS = "short_rows"
# Of this argument, the product of queries, keys and values, they leave out the values.
WITHOUT_VALUES = {"qk_norm": 0, "qk_norm_backward": 3}
# They read as much of their first argument as they return.
GATHERS = (aten.index_select, aten.index, aten.gather, aten.embedding)
# They write their first argument without reading it.
OVERWRITES = (aten.fill_, aten.zero_, aten.copy_, aten.index_copy_)
# They launch nothing. The schema of ``_unsafe_view`` does not say that it is a view.
WITHOUT_KERNEL = (
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.set_,
    aten._unsafe_view,
    aten.promote_types,
)


@dataclass
class Work:
    """Of one kind of operator: FLOPs, bytes moved, operators, seconds of a GPU, and time of the
    host in launches of torch's own operators.
    """

    flops: float = 0.0
    bytes: float = 0.0
    operators: float = 0.0
    seconds: float = 0.0
    launches: float = 0.0

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
        if operator not in WITHOUT_KERNEL and not _returns_views(func):
            self._count(operator, args, result)
        return result

    def _count(self, operator: Any, args: tuple[Any, ...], result: Any) -> None:
        kind, work = ELEMENTWISE, Work(bytes=_bytes_moved(operator, args, result), operators=1)
        if operator in MATRIX_OPERATORS:
            kind, work.flops = PRODUCTS, _product_flops(args, result)
            work.seconds = work.flops / self.gpu.flops
        elif _attends(operator):
            kind, attention = self._attention(operator, args)
            work.flops, work.seconds = attention.flops, attention.seconds(self.gpu)

        moving = work.bytes / self.gpu.memory_bandwidth
        work.seconds = max(work.seconds, moving, self.gpu.shortest_kernel)
        if _adds_up_sums(operator, args, result):
            work.operators += 1
            work.seconds += self.gpu.shortest_kernel
        work.launches = TRITON_LAUNCHES if _is_own(operator) else 1
        self.work[kind] = self.work.get(kind, Work()).plus(work, 1)

    def _attention(self, operator: Any, args: tuple[Any, ...]) -> tuple[str, AttentionCall]:
        name = operator.__name__
        backward = operator in ATTENTION_BACKWARD or name.endswith("_backward")
        if SHORT_ROWS in name:
            call = AttentionCall.of_short_rows(args, backward=backward)
            shapes: tuple[Any, ...] = (SHORT_ROWS, call.rows, call.queries)
        else:
            places = (ATTENTION_BACKWARD if backward else ATTENTION_FORWARD)[operator]
            packed = "_scaled_dot_product" not in name
            call = AttentionCall.of(args, places, packed=packed, backward=backward)
            shapes = tuple(tuple(args[place].shape) for place in places)

        if not backward:
            self._attention_of[shapes] = self._calling
        return self._attention_of.get(shapes, self._calling), call


@dataclass(frozen=True)
class AttentionCall:
    """One call of FlashAttention-2: ``rows`` of ``queries`` x ``keys``, ``heads`` of ``width``.

    With ``in_registers`` one of the Triton kernel for short rows, whose tile is a row of one head.
    """

    rows: int
    queries: int
    keys: int
    heads: int
    width: int
    backward: bool
    in_registers: bool = False

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

    @classmethod
    def of_short_rows(cls, args: tuple[Any, ...], *, backward: bool) -> AttentionCall:
        """From the first tensor with heads, which has rows, tokens, ..., heads and their width."""
        tokens = next(one for one in args if isinstance(one, Tensor) and one.dim() >= 4)
        (rows, length), (heads, width) = tokens.shape[:2], tokens.shape[-2:]
        return cls(rows, length, length, heads, width, backward, in_registers=True)

    @property
    def flops(self) -> float:
        """Of the scores and the weighted sum; backward also recomputes the scores."""
        forward = 4.0 * self.rows * self.heads * self.queries * self.keys * self.width
        return 2.5 * forward if self.backward else forward

    def seconds(self, gpu: CostModel) -> float:
        """Of the whole call."""
        rows = self.rows * self.heads
        if self.in_registers:
            # Tiles are powers of two, and heads multiples of 16; nothing is added up in memory.
            tile, width = 1 << max(self.queries - 1, 15).bit_length(), -(-self.width // 16) * 16
            pairs = 4.0 * rows * tile**2 * width
            if self.backward:
                return 2.5 * pairs / gpu.attention_backward
            return pairs / gpu.attention_forward
        return gpu.attention(rows, self.queries, self.keys, self.width, backward=self.backward)


def _attends(operator: Any) -> bool:
    is_flash = operator in ATTENTION_FORWARD or operator in ATTENTION_BACKWARD
    return is_flash or SHORT_ROWS in operator.__name__


def _is_own(operator: Any) -> bool:
    """Whether Python launches it, as Triton kernels."""
    name: str = operator._qualified_op_name
    return name.startswith("opensora_sp::")


def _adds_up_sums(operator: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether a Triton kernel's backward has gradients that are sums over tokens (``sums.py``)."""
    if not (_is_own(operator) and operator.__name__.endswith("_backward")):
        return False
    gradient = next(one for one in args if isinstance(one, Tensor))
    return any(0 < one.numel() < gradient.numel() for one in tree_leaves(result))


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
    moved = sum(map(_bytes_of, (*distinct.values(), *written)))
    if operator.__name__ in WITHOUT_VALUES:
        moved -= args[WITHOUT_VALUES[operator.__name__]].nbytes // 3
    return float(moved)


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
