"""Casts to float32 and below lifted to float64, so that models which cast are compared exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LOWER = (torch.float32, torch.bfloat16, torch.float16)
LIFTED = dict.fromkeys(LOWER, torch.float64)
CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class ObservedPrecision(TorchFunctionMode):
    """Record the lowest precision that calls of torch return."""

    def __init__(self) -> None:
        super().__init__()
        self.lowest = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward:
            # Recomputation under gradient checkpointing is seen as well.
            kwargs = dict(kwargs or {})
            kwargs |= {"grad_tensors": kwargs.pop("gradient")} if "gradient" in kwargs else {}
            with self:
                return torch.autograd.backward(*args, **kwargs)

        result = self.call(func, args, kwargs or {})
        if isinstance(result, Tensor) and result.is_floating_point():
            self.lowest = max(self.lowest, result.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class Lifted(ObservedPrecision):
    """Every lower dtype in a call of torch is float64; ``.float()`` is ``.double()``."""

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in CASTS:
            return args[0].double()
        args = [_lifted(argument) for argument in args]
        return func(*args, **{name: _lifted(argument) for name, argument in kwargs.items()})


def _lifted(argument: Any) -> Any:
    return LIFTED.get(argument, argument) if isinstance(argument, torch.dtype) else argument


@contextmanager
def precision_of(dtype: torch.dtype) -> Iterator[ObservedPrecision]:
    """Run in a precision: in float64 with casts lifted, and float64 for tensors without a dtype."""
    default = torch.get_default_dtype()
    try:
        if dtype == torch.float64:
            torch.set_default_dtype(dtype)
        with Lifted() if dtype == torch.float64 else ObservedPrecision() as mode:
            yield mode
    finally:
        torch.set_default_dtype(default)
