"""What code compiled by inductor allocates, on meta tensors: blocks with ``compile="blocks"``.

Dynamo and AOTAutograd run as they do for inductor, with its decompositions and its partition of
forward and backward, so what forward keeps is exact. The graphs are not compiled, but run by
``FusedGraph``, which allocates what inductor's code would:

* operators that call a library (products, attention, exchanges, anything complex) give a buffer,
  and take buffers;
* sums and means give a buffer;
* elementwise operators are fused into their readers, unless the result leaves the graph, a library
  reads it, or several readers would repeat many reads (``realize_reads_threshold`` of inductor);
* a buffer is freed after its last reader, and a fused result takes the place of one that is read
  last.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
PRODUCTS = (
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.convolution,
    aten.convolution_backward,
)
ATTENTION = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
)
SUMS = (aten.sum, aten.mean, aten.var_mean, aten.var)
REDUCTIONS = (*SUMS, aten.amax, aten.amin, aten.any, aten.prod)

# inductor's realize_reads_threshold and realize_acc_reads_threshold
READS_OF_REUSED, READS = 4, 8


def backend(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend of ``torch.compile`` that allocates as inductor would and computes nothing."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.decomposition import select_decomp_table

    def partition(joint: GraphModule, joint_inputs: Any, **options: Any) -> Any:
        # The folding of constants takes tensors without data for constants.
        with torch._inductor.config.patch(joint_graph_constant_folding=False):  # type: ignore[attr-defined]
            _recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(
            joint, joint_inputs, **options, compiler="inductor"
        )

    compiler = aot_autograd(
        fw_compiler=FusedGraph, partition_fn=partition, decompositions=select_decomp_table()
    )
    return compiler(module, inputs)  # type: ignore[no-any-return]


class FusedGraph:
    """A graph of AOTAutograd, called with a list of its inputs that it empties."""

    def __init__(self, module: GraphModule, _: Sequence[Any]) -> None:
        self._boxed_call = True  # of the instance, as wrappers copy it
        *self.nodes, output = module.graph.nodes
        self.outputs: Any = output.args[0]
        self.results = output.all_input_nodes
        self.reads: dict[Node, set[Node]] = {}  # the buffers that fused nodes are computed from
        self.buffers = self._buffers()
        self.last_readers = self._last_readers()

    def _buffers(self) -> set[Node]:
        """The nodes that have memory: inputs, buffers, and views of these."""
        wanted = {_base(node) for node in self.results}
        for node in self.nodes:
            if _calls_library(node):
                wanted |= {_base(one) for one in node.all_input_nodes}

        found: set[Node] = set()
        for node in self.nodes:
            read: set[Node] = set()
            for one in node.all_input_nodes:
                read |= {one} if one in found else self.reads[one]
            if _is_view(node):
                has_memory = node.all_input_nodes[0] in found
            else:
                # Readers of a fused result repeat its reads; inductor limits these.
                most = READS_OF_REUSED if len(node.users) > 1 else READS
                has_memory = (
                    node.op == "placeholder"
                    or node in wanted
                    or _calls_library(node)
                    or _packet(node) in REDUCTIONS
                    or len(read) > most
                )
            if has_memory:
                found.add(node)
            self.reads[node] = read
        return found

    def _last_readers(self) -> dict[Node, int]:
        last: dict[Node, int] = {}
        for step, node in enumerate(self.nodes):
            if node in self.buffers:
                last |= dict.fromkeys((node, *self.reads[node]), step)
        return last | dict.fromkeys(self.results, len(self.nodes))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        expiring: dict[int, list[Node]] = {}
        for node, step in self.last_readers.items():
            expiring.setdefault(step, []).append(node)

        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        values: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))
        inputs.clear()

        for step, node in enumerate(self.nodes):
            if node in self.buffers and node.op != "placeholder":
                self._reuse_buffer(node, expiring.get(step, ()), values)
                values[node] = self._value(node, values)
            for one in expiring.get(step, ()):
                values.pop(one, None)
        return [values[one] if isinstance(one, Node) else one for one in self.outputs]

    def _reuse_buffer(self, node: Node, expiring: Sequence[Node], values: dict[Node, Any]) -> None:
        """Free one buffer whose place a fused result takes."""
        size = _bytes(node)
        if _calls_library(node) or _is_view(node) or not size:
            return

        for one in expiring:
            is_buffer = one is not node and one.op != "placeholder" and not _is_view(one)
            if is_buffer and _bytes(one) == size:
                values.pop(one, None)
                return

    def _value(self, node: Node, values: dict[Node, Any]) -> Any:
        if not (_is_view(node) or _calls_library(node) or "val" not in node.meta):
            return _empty(node)

        def value_of(one: Node) -> Any:
            return values[one] if one in values else _empty(one)

        args: Any = torch.fx.map_arg(node.args, value_of)
        kwargs: Any = torch.fx.map_arg(node.kwargs, value_of)
        target: Any = node.target
        return target(*args, **kwargs)


def _empty(node: Node) -> Any:
    return tree_map(_empty_like, node.meta["val"])


def _empty_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return _number(value)
    size, stride = map(_number, value.shape), map(_number, value.stride())
    return torch.empty_strided([*size], [*stride], dtype=value.dtype, device="meta")


def _number(value: Any) -> Any:
    is_symbol = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return value.node.hint if is_symbol else value


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    count: int = math.prod(map(_number, value.shape))
    return count * value.dtype.itemsize


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def _is_view(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem or _packet(node) in (aten._unsafe_view, aten.reshape):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _base(node: Node) -> Node:
    """What a node is a view of."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _calls_library(node: Node) -> bool:
    if node.op != "call_function" or _is_view(node):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return False

    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    is_complex = any(one.dtype.is_complex for one in tensors)
    return (
        is_complex
        or _packet(node) in PRODUCTS + ATTENTION
        or node.target.namespace not in ("aten", "prims")
    )
