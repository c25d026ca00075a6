"""``torch.compile`` of the parts of a model between two switches: one graph for each kind of part and each shape.

All blocks of a kind share their graphs, since parameters are inputs of a graph. Shapes are static: every bucket has
graphs of its own. What differs from batch to batch within a bucket stays outside: the number of text tokens is marked
as dynamic, and attention to packed tokens, whose lengths are host integers, runs between graphs (``attention.py``). So
do the exchanges of sequence parallelism.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .conditioning import Condition

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)

MAX_GRAPHS = 256  # of a part; beyond torch's limit of 8 a new bucket would run uncompiled


def compile_blocks(model: Model, *, backend: str | Callable[..., Any] = "inductor") -> Model:
    """Let ``torch.compile`` compile each block of a model when it first meets a shape.

    Works in place and returns the same object; parameters, state dict and what hangs at its points stay as they are.

    Args:
        backend: a backend of ``torch.compile``. "inductor" needs Triton on a GPU and a C++ compiler on a CPU.

    Raises:
        ValueError: if the model has no blocks that are known here.
    """
    if "compile_backend" not in vars(
        model
    ):  # hasattr is true of wrappers (peft's), where setting it does nothing
        raise ValueError(
            f"got a model of class {type(model).__name__}; expected an STDiT model; call torch.compile on the blocks "
            "of other models, and pass the model that a wrapper holds"
        )
    limit = (
        "recompile_limit"
        if hasattr(torch._dynamo.config, "recompile_limit")
        else "cache_size_limit"
    )
    setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), MAX_GRAPHS))
    cast(Any, model).compile_backend = backend
    logger.info("blocks are compiled with %s", backend)
    return model


def compiled(
    part: Callable[..., Tensor], backend: str | Callable[..., Any]
) -> Callable[..., Tensor]:
    """``part(x, condition, keep)`` of a model, compiled."""
    return partial(_call, part, backend)


def _call(
    part: Callable[..., Tensor], backend: Any, x: Tensor, condition: Condition, keep: Tensor | None
) -> Tensor:
    for tokens in (condition.text, *condition.keys.values()):
        torch._dynamo.maybe_mark_dynamic(tokens, 0)
    if isinstance(
        part, MethodType
    ):  # in two, for a graph made for a bound method is that block's alone
        return _compiled(backend)(part.__func__, part.__self__, x, condition, keep)
    return _compiled(backend)(part, x, condition, keep)


@cache
def _compiled(backend: Any) -> Callable[..., Tensor]:
    def run_part(part: Callable[..., Tensor], *args: Any) -> Tensor:
        return part(*args)

    return torch.compile(run_part, backend=backend, dynamic=False)
