"""Casts to float32 and below lifted to float64, so that models which cast are compared exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LOWER = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class Lifted(TorchFunctionMode):
    """Every lower dtype in a call of torch is float64; ``.float()`` is ``.double()``.

    Attributes:
        lowest: precision that calls have returned.
    """

    is_lifting = True

    def __init__(self) -> None:
        super().__init__()
        self.lowest = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.backward and not kwargs.get("inputs"):
            return self._backward(args[0], **kwargs)
        if self.is_lifting:
            func = torch.Tensor.double if func in CASTS else func
            args = [_lifted(argument) for argument in args]
            kwargs = {name: _lifted(argument) for name, argument in kwargs.items()}

        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            self.lowest = max(self.lowest, result.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result

    def _backward(
        self, root: Tensor, gradient: Any, retain_graph: Any, create_graph: Any, **kwargs: Any
    ) -> None:
        """Call the engine under this mode: a call of torch would compute again without it."""
        gradient = torch.ones_like(root) if gradient is None else gradient
        keeps = create_graph if retain_graph is None else retain_graph
        engine: Any = torch.autograd.Variable._execution_engine
        flags = {"allow_unreachable": True, "accumulate_grad": True}
        with self:
            engine.run_backward((root,), (gradient,), keeps, create_graph, (), **flags)


def _lifted(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in LOWER else argument


@contextmanager
def precision_of(dtype: torch.dtype) -> Iterator[Lifted]:
    """Run in a precision: in float64 with casts lifted, and float64 for tensors without a dtype."""
    default = torch.get_default_dtype()
    with Lifted() as mode:
        mode.is_lifting = dtype == torch.float64
        torch.set_default_dtype(dtype if mode.is_lifting else default)
        try:
            yield mode
        finally:
            torch.set_default_dtype(default)
