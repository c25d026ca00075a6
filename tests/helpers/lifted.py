"""Casts to float32 lifted to float64, so that models which cast inside are compared exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LIFTED = {torch.float32: torch.float64, torch.float: torch.float64}


class Lifted(TorchFunctionMode):
    """Every dtype float32 in a call of torch is float64; ``.float()`` is ``.double()``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = [LIFTED.get(x, x) if isinstance(x, torch.dtype) else x for x in args]
        kwargs = {
            name: LIFTED.get(x, x) if isinstance(x, torch.dtype) else x
            for name, x in (kwargs or {}).items()
        }
        return func(*args, **kwargs)
