"""``torch.compile`` of the parts of a model between two switches.

There is one graph for each kind of part and each shape. All blocks of a kind share their graphs,
since parameters are inputs of a graph. Shapes are static: every bucket has graphs of its own.

What differs from batch to batch within a bucket is dynamic: the number of text tokens, the lengths
of packed attention, which is one operator (``packed_operator.py``), and the tokens inside of masks.
The exchanges of sequence parallelism run between graphs; those of branches and of heads are part of
a block's graph. Gathers, and exchanges in low precision, end one.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from opensora_sp.compile_cache import has_triton, use_compile_cache

from .conditioning import Condition, RowText

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

SETTINGS = ("auto", "blocks")
COMPILERS = ("cc", "gcc", "clang")

MAX_GRAPHS = 256  # of a part; beyond torch's limit of 8 a new bucket would run uncompiled


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

    kept = use_compile_cache() if backend == "inductor" else None
    dynamo: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    setattr(dynamo, limit, max(getattr(dynamo, limit), MAX_GRAPHS))
    cast(Any, model).compile_backend = backend
    where = f"; compiled code is kept in {kept}" if kept else ""
    logger.info("blocks are compiled with %s%s", backend, where)
    return model


def compiles_blocks(setting: str | None, device_type: str, *, all_kernels_run: bool) -> bool:
    """Whether a config's ``compile`` has blocks compiled on "cuda" or "cpu".

    "auto" compiles them on CUDA where Triton and the C compiler that it calls are installed, unless
    all Triton kernels of ``models/kernels`` run: they leave a compiler nothing to fuse.
    """
    return setting == "blocks" or (
        setting == "auto" and _obstacle(device_type, all_kernels_run) is None
    )


def compile_as_set(
    model: nn.Module, setting: str | None, device_type: str, kernels: Mapping[str, str]
) -> None:
    """Compile the blocks of a model, or log why a config's ``compile`` leaves them as they are.

    ``kernels``: "triton" or "torch" for each kernel (``choose_kernels``).
    """
    all_run = set(kernels.values()) == {"triton"}
    if compiles_blocks(setting, device_type, all_kernels_run=all_run):
        compile_blocks(model)
    elif setting == "auto":
        logger.info("blocks run in eager mode: %s", _obstacle(device_type, all_run))


def _obstacle(device_type: str, all_kernels_run: bool) -> str | None:
    """Why "auto" does not compile on such devices; None if it does."""
    if device_type != "cuda":
        return f"the device is {device_type}"
    if all_kernels_run:
        return "all Triton kernels run, which leave a compiler nothing to fuse"
    if not has_triton():
        return "Triton is not installed"
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        return f"Triton needs a C compiler, and none of {', '.join(COMPILERS)} is installed"
    return None


@contextmanager
def reporting_compilation(what: str) -> Iterator[None]:
    """Log how many graphs are compiled in this context, if any, and the time that it takes."""
    before, start = num_graphs(), time.perf_counter()
    yield
    if made := num_graphs() - before:
        seconds = time.perf_counter() - start
        logger.info("%s: warm-up of %.1f s, in which %d graphs were compiled", what, seconds, made)


def num_graphs() -> int:
    """How many graphs this process has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def run_compiled(
    backend: str | Callable[..., Any],
    part: Callable[..., Tensor],
    x: Tensor,
    condition: Condition,
    *arguments: Tensor | None,
) -> Tensor:
    """``part(x, condition, *arguments)``, compiled."""
    # Strides are part of a graph: the first block would have one of its own.
    x = x.contiguous()
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
    for one in condition.extra.values():
        if isinstance(one, RowText):
            mark(one.tokens, 0)
            mark(one.packing.lengths, 1)

    # Those of the local rows, and of rows in which a part of these attends elsewhere.
    for groups in condition.rows.grid.known_groups:
        if not groups.are_rows:
            mark(groups.packing.lengths, 1)
        if groups.index is not None:
            mark(groups.index, 0)


@cache
def _compiled(backend: Any) -> Callable[..., Tensor]:
    def run_part(part: Callable[..., Tensor], *args: Any) -> Tensor:
        return part(*args)

    return torch.compile(run_part, backend=backend, dynamic=False)
