"""Contexts of checkpointing, autograd's state, and functions outside of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.autograd import function as autograd_function

Context: TypeAlias = AbstractContextManager[Any]
Pair: TypeAlias = tuple[Context, Context]
"""The contexts of forward and of recomputation."""


class Once(AbstractContextManager[None]):
    """A context of recomputation, which uses up what was kept and so can be entered once.

    Raises:
        ValueError: when it is entered again.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.is_used = context, False

    def __enter__(self) -> None:
        if self.is_used:
            raise ValueError(
                "got a second backward pass (retain_graph=True) through checkpointed blocks that "
                "keep activations, or what they receive from other ranks; expected one, which uses "
                "that up; set recompute_communication=True and grad_checkpoint=True, switch "
                "gradient checkpointing off, or call the model again"
            )
        self.is_used = True
        self.context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.context.__exit__(*error)


class Together(AbstractContextManager[None]):
    """Several contexts, entered one inside the other."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        self.stack = ExitStack()
        for context in self.contexts:
            self.stack.enter_context(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)


def together(makers: Sequence[Callable[[], Pair]]) -> Pair:
    """The pairs of several functions as one."""
    forward, recomputation = zip(*(maker() for maker in makers), strict=True)
    return Together(forward), Together(recomputation)


Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """``torch.compiler.disable``, with types: the function runs between graphs."""
    return cast(Function, torch.compiler.disable(function))


def between_graphs(function: Function) -> Function:
    """As ``uncompiled``, but what the function calls may be compiled."""
    return cast(Function, torch.compiler.disable(function, recursive=False))


def once_differentiable(backward: Function) -> Function:
    """Mark a backward pass that has no derivative."""
    return cast(Function, autograd_function.once_differentiable(backward))


def is_backward_running() -> bool:
    """True if autograd is running: a forward is then a recomputation of checkpointing."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
