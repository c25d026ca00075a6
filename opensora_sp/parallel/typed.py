"""What torch has without types or public names: decorators, hook arguments, autograd's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.autograd import function as autograd_function

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Local: TypeAlias = Callable[..., Any]  # what a hook point does on one rank
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]


def once_differentiable(backward: Decorated) -> Decorated:
    """For a backward pass that has none of its own."""
    return cast(Decorated, autograd_function.once_differentiable(backward))


def is_backward_running() -> bool:
    """Whether autograd is running: a forward is then a recomputation of checkpointing."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
