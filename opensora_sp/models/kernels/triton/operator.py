"""A differentiable torch operator made of functions that launch kernels.

``torch.compile``, fake tensors and selective checkpointing see one node, ``opensora_sp::<name>``,
and in backward another, ``opensora_sp::<name>_backward``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

Function = Callable[..., Any]


def differentiable(
    name: str,
    forward: Function,
    backward: Function,
    *,
    fake: Function,
    fake_backward: Function,
    outputs: Sequence[str],
    gradients: Sequence[str],
    residuals: Sequence[str] = (),
) -> Function:
    """Make an operator with a backward of its own.

    What ``backward`` takes is found by the names of its parameters: an input of ``forward``, one
    of its outputs or residuals, or ``grad_<output>``. These alone are kept for backward::

        def forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...        # y, inverse
        def backward(grad_y: Tensor, x: Tensor, inverse: Tensor) -> Tensor: ... # of x

        normalize = differentiable(
            "normalize", forward, backward, fake=..., fake_backward=...,
            outputs=["y"], residuals=["inverse"], gradients=["x"],
        )

    Args:
        name: the operator is ``opensora_sp::<name>``.
        forward, backward: launch kernels. Parameters and results have types that
            ``torch.library.infer_schema`` knows; no result shares memory with an argument.
            ``backward`` returns a tensor for each of ``gradients``, an empty one where the input is
            None.
        fake, fake_backward: the same signatures; allocate the results without computing.
        outputs: names of the results that callers get.
        residuals: names of the further results of ``forward``, which only backward reads.
        gradients: names of the inputs that ``backward`` returns gradients of, in its order.

    Returns:
        A function of the inputs: one output, or a tuple of several.
    """
    operator = opaque_operator(name, forward, fake)
    operator_backward = opaque_operator(f"{name}_backward", backward, fake_backward)
    inputs = list(inspect.signature(forward).parameters)
    needed = list(inspect.signature(backward).parameters)

    def keep(ctx: Any, inputs_given: tuple[Any, ...], results: Any) -> None:
        results = _as_tuple(results)
        values = dict(zip(inputs, inputs_given, strict=True))
        values |= dict(zip((*outputs, *residuals), results, strict=True))

        kept = {key: values[key] for key in needed if key in values}
        ctx.tensor_names = [key for key, value in kept.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(kept.pop(key) for key in ctx.tensor_names))
        ctx.others = kept

        # Zeros are made for outputs that callers get, and not for residuals.
        ctx.set_materialize_grads(False)
        visible = results[: len(outputs)]
        ctx.forms = [(result.shape, result.dtype, result.device) for result in visible]

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        values = ctx.others | dict(zip(ctx.tensor_names, ctx.saved_tensors, strict=True))
        for output, grad, form in zip(outputs, grads, ctx.forms, strict=False):
            values[f"grad_{output}"] = _zeros(*form) if grad is None else grad

        results = operator_backward(*(values[key] for key in needed))
        by_input = dict(zip(gradients, _as_tuple(results), strict=True))
        needs = zip(inputs, ctx.needs_input_grad, strict=True)
        return tuple(by_input.get(key) if is_needed else None for key, is_needed in needs)

    torch.library.register_autograd(
        f"opensora_sp::{name}",
        differentiate,
        setup_context=lambda ctx, inputs, output: keep(ctx, inputs, output),
    )

    def call(*args: Any, **named: Any) -> Any:
        results = _as_tuple(operator(*args, **named))
        return results[0] if len(outputs) == 1 else results[: len(outputs)]

    return call


def opaque_operator(name: str, function: Function, fake: Function) -> Function:
    """The torch operator ``opensora_sp::<name>``, without a gradient; ``fake`` as above.

    It launches on the device of its first tensor, whatever the current device is.
    """

    @wraps(function)
    def on_device(*args: Any, **named: Any) -> Any:
        first = next(value for value in (*args, *named.values()) if isinstance(value, Tensor))
        # Triton launches on the current device and its stream. Does nothing on a CPU.
        with torch.cuda.device_of(first):
            return function(*args, **named)

    definition = custom_op(f"opensora_sp::{name}", on_device, mutates_args=())
    definition.register_fake(fake)
    overload: Function = getattr(torch.ops.opensora_sp, name).default
    return overload


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
