"""``torch.compile`` of the parts of a model between two switches.

There is one graph for each kind of part and each shape. All blocks of a kind share their graphs,
since parameters are inputs of a graph. Shapes are static: every bucket has further graphs.

What differs from batch to batch within a bucket is dynamic: the number of text tokens, and the
tokens inside of masks. Attention, gathers, and the exchanges of a switch or in low precision run
between graphs; the exchanges of branches and of heads are part of a block's graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from .conditions import Condition, RowText

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

# Of a part; beyond torch's limit of 8 a new bucket would run uncompiled.
MAX_GRAPHS = 256


def compile_blocks(model: Model, *, backend: str | Callable[..., Any] = "inductor") -> Model:
    """Let ``torch.compile`` compile each block of a model at the first call with a shape.

    Works in place and returns the same object. Parameters, state dict and attached hooks stay.
    Logs a warning: nothing compares the results with eager mode.

    Args:
        backend: a backend of ``torch.compile``. "inductor" needs Triton on a GPU and a C++ compiler
            on a CPU.

    Raises:
        ValueError: if the model is no STDiT model.
    """
    # hasattr is true of wrappers (peft's), where setting the attribute does nothing.
    if "run_compiled" not in vars(model):
        raise ValueError(
            f"got a model of class {type(model).__name__}; expected an STDiT model; call "
            "torch.compile on the blocks of other models, and pass the model that a wrapper holds"
        )

    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_GRAPHS)
    cast(Any, model).run_compiled = partial(run_compiled, backend)
    logger.warning(
        "blocks are compiled with %s; their results are not compared with eager mode", backend
    )
    return model


def run_compiled(
    backend: str | Callable[..., Any],
    part: Callable[..., Tensor],
    x: Tensor,
    condition: Condition,
    *arguments: Tensor | None,
) -> Tensor:
    """``part(x, condition, *arguments)``, compiled."""
    # Strides are part of a graph: the first block would have another one.
    x = x.contiguous()
    _mark_what_differs(condition)

    run = _compiled(backend)
    # A graph made for a bound method would be that block's alone.
    if isinstance(part, MethodType):
        return run(part.__func__, part.__self__, x, condition, *arguments)
    return run(part, x, condition, *arguments)


def _mark_what_differs(condition: Condition) -> None:
    """Mark the sizes that differ from batch to batch as dynamic."""
    mark = torch._dynamo.maybe_mark_dynamic
    mark(condition.text.tokens, 0)
    if condition.block_keys_values is not None:
        mark(condition.block_keys_values, 0)
    for extra in condition.extra.values():
        if isinstance(extra, RowText):
            mark(extra.tokens, 0)

    # Groups of the local rows, and of rows in which a part of these attends elsewhere.
    for groups in condition.rows.grid.known_groups:
        if groups.index is not None:
            mark(groups.index, 0)


@cache
def _compiled(backend: Any) -> Callable[..., Tensor]:
    def run_part(part: Callable[..., Tensor], *args: Any) -> Tensor:
        return part(*args)

    return torch.compile(run_part, backend=backend, dynamic=False)
