"""``torch.compile`` of the parts of a model between two switches.

There is one graph for each kind of part and each shape. All blocks of a kind share their graphs,
since parameters are inputs of a graph. Shapes are static: every bucket has graphs of its own.

What differs from batch to batch within a bucket stays outside of the graphs. The number of text
tokens is marked as dynamic. Attention to packed tokens, whose lengths are host integers, runs
between graphs (``attention.py``), as do the exchanges of sequence parallelism.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .conditioning import Condition

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])

MAX_GRAPHS = 256  # of a part; beyond torch's limit of 8 a new bucket would run uncompiled


def uncompiled(function: Function) -> Function:
    """``torch.compiler.disable``, with types: the function runs between graphs."""
    return cast(Function, torch.compiler.disable(function))


def compile_blocks(model: Model, *, backend: str | Callable[..., Any] = "inductor") -> Model:
    """Let ``torch.compile`` compile each block of a model at the first call with a shape.

    Works in place and returns the same object. Parameters, state dict and attached hooks stay.

    Args:
        backend: a backend of ``torch.compile``. "inductor" needs Triton on a GPU and a C++ compiler
            on a CPU.

    Raises:
        ValueError: if the model is no STDiT model.
    """
    # hasattr is true of wrappers (peft's), where setting the attribute does nothing.
    if "compile_backend" not in vars(model):
        raise ValueError(
            f"got a model of class {type(model).__name__}; expected an STDiT model; call "
            "torch.compile on the blocks of other models, and pass the model that a wrapper holds"
        )

    dynamo: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    setattr(dynamo, limit, max(getattr(dynamo, limit), MAX_GRAPHS))
    cast(Any, model).compile_backend = backend
    logger.info("blocks are compiled with %s", backend)
    return model


def run_compiled(
    backend: str | Callable[..., Any],
    part: Callable[..., Tensor],
    x: Tensor,
    condition: Condition,
    *arguments: Tensor | None,
) -> Tensor:
    """``part(x, condition, *arguments)``, compiled."""
    if condition.keys_values:
        condition = _of_block(condition, getattr(part, "__self__", part))
    _mark_what_differs(condition)

    run = _compiled(backend)
    # A graph made for a bound method would be that block's alone.
    if isinstance(part, MethodType):
        return run(part.__func__, part.__self__, x, condition, *arguments)
    return run(part, x, condition, *arguments)


def _of_block(condition: Condition, block: Any) -> Condition:
    """The condition with this block's keys and values alone.

    A graph that looks its block up in a dict would be that block's alone.
    """
    own = condition.keys_values.get(block.cross_attn)
    return replace(condition, keys_values={}, own_keys_values=own)


def _mark_what_differs(condition: Condition) -> None:
    """Mark the sizes that differ from batch to batch as dynamic."""
    mark = torch._dynamo.maybe_mark_dynamic
    mark(condition.text, 0)
    if condition.own_keys_values is not None:
        mark(condition.own_keys_values, 0)
    # Tensors of lengths are made here, and not where a graph is traced.
    mark(condition.packing.lengths, 1)

    groups = condition.groups
    if groups is not None and not groups.are_rows:
        mark(groups.packing.lengths, 1)
        if groups.index is not None:
            mark(groups.index, 0)


@cache
def _compiled(backend: Any) -> Callable[..., Tensor]:
    def run_part(part: Callable[..., Tensor], *args: Any) -> Tensor:
        return part(*args)

    return torch.compile(run_part, backend=backend, dynamic=False)
