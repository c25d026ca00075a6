"""Autograd's state and decorators, which torch has without types or public names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.autograd import function as autograd_function

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


def once_differentiable(backward: Decorated) -> Decorated:
    """Mark a backward pass that has no derivative."""
    return cast(Decorated, autograd_function.once_differentiable(backward))


def is_backward_running() -> bool:
    """True if autograd is running: a forward is then a recomputation of checkpointing."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
