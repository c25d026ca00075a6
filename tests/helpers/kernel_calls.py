"""In which forms models call the kernels: dtypes, and how tensors and gradients lie in memory.

    with recorded_calls() as calls:
        model(...).sum().backward()
    calls  # {"modulation": {Call("add_gated", ...), ...}, ...}

Kernels count as chosen, on the CPU, and their references run in their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from opensora_sp.models import attention, hook_points, layers
from opensora_sp.models.kernels import fused, triton
from opensora_sp.models.kernels.examples import Example, kernel_names
from opensora_sp.models.kernels.verification import CPU, results

Forms = tuple[tuple[str, str], ...]
Calls = dict[str, set["Call"]]


class Call(NamedTuple):
    """The arguments of a call, or the gradients of its results ("of 0"), each with its form."""

    function: str
    forms: Forms


def form_of(value: Any) -> str:
    """Of a tensor its dtype, its place in memory, and of an entry of a modulation what shares it.

    Of other arguments whether they are given.
    """
    if not isinstance(value, Tensor):
        return type(value).__name__
    entry = ""
    if value.dim() == 4 and value.shape[1:3] != (1, 1) and 1 in value.shape[1:3]:
        entry = ", of tokens" if value.shape[1] == 1 else ", of rows"
    return f"{str(value.dtype).removeprefix('torch.')}, {_place_of(value)}{entry}"


def _place_of(z: Tensor) -> str:
    if z.is_contiguous():
        return "dense"
    if z.dim() > 1 and z.transpose(0, 1).is_contiguous():
        return "across"  # row by row of the other layout
    return "cut out" if z.stride(-1) == 1 else "apart"


def _form(function: str, arguments: dict[str, Any]) -> Call:
    return Call(function, tuple((name, form_of(value)) for name, value in arguments.items()))


class _Seen(torch.autograd.Function):
    """The same tensors; backward shows their gradients."""

    @staticmethod
    def forward(ctx: Any, show: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.show = show
        return tuple(z.view_as(z) for z in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.show(grads)
        return (None, *grads)


def watched(calls: set[Call], function: str, *args: Any, **options: Any) -> Any:
    """Call a function of a reference, and record the call and, in backward, the gradients."""
    reference = getattr(fused, function)
    bound = inspect.signature(reference).bind(*args, **options)
    bound.apply_defaults()
    calls.add(_form(function, bound.arguments))

    def show(grads: tuple[Tensor, ...]) -> None:
        calls.add(_form(function, {f"of {i}": grad for i, grad in enumerate(grads)}))

    with mock.patch.object(fused, "chosen", _none):
        outputs = reference(*args, **options)
    if not isinstance(outputs, tuple):
        return _Seen.apply(show, outputs)[0]
    return _Seen.apply(show, *outputs)


def _none(name: str, like: Tensor) -> bool:
    return False


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    """The calls by models inside of the context, by kernel."""
    calls: Calls = {name: set() for name in kernel_names()}

    def chosen(name: str, like: Tensor) -> bool:
        return like.dtype != torch.float64

    with ExitStack() as stack:
        for module in (attention, fused, hook_points, layers):
            stack.enter_context(mock.patch.object(module, "chosen", chosen))
        references = [name for name, member in vars(fused).items() if inspect.isfunction(member)]
        for name in kernel_names():
            functions = {
                function: partial(watched, calls[name], function) for function in references
            }
            fake = SimpleNamespace(**functions)
            stack.enter_context(mock.patch.object(triton, name, fake, create=True))
        yield calls


def calls_of(example: Example, dtype: torch.dtype) -> set[Call]:
    """The calls that an example of a kernel makes when it is verified for this dtype."""
    calls: set[Call] = set()
    results(partial(watched, calls, example.function), example, dtype, CPU)
    return calls
