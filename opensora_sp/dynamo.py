"""What ``torch.compile`` leaves out of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """``torch.compiler.disable``, with types: the function runs between graphs."""
    return cast(Function, torch.compiler.disable(function))
