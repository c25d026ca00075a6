"""Attentions that ordinary modules compute, caught while such a module runs.

These are calls of ``scaled_dot_product_attention``, and of diffusers' ``dispatch_attention_fn``,
which has other backends as well. Diffusers' model files import it by name, so it is replaced in
each of them; outside of ``catching`` it does what it did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Attention:
    """An attention that was called: q, k, v ``[B, L, H, D]`` and a mask -> ``[B, L, H, D]``.

    ``heads_first``: the function itself takes ``[B, H, L, D]``.
    """

    function: Callable[..., Tensor]
    settings: Mapping[str, Any]
    heads_first: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        with _handling(None):
            out = self.function(
                *(self.transposed(x) for x in (q, k, v)), attn_mask=mask, **self.settings
            )
        return self.transposed(out)

    def transposed(self, x: Tensor) -> Tensor:
        """From the function's axes to ours, or back."""
        return x.transpose(1, 2) if self.heads_first else x


Handler: TypeAlias = Callable[[Attention, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Called in place of an attention, with it as first argument."""

DISPATCH = "dispatch_attention_fn"
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

# The innermost is the last; None while an attention runs.
_handlers: list[Handler | None] = []


@contextmanager
def catching(handler: Handler) -> Iterator[None]:
    """Hand the attentions that are computed here to ``handler``."""
    with _handling(handler), _CatchTorch():
        yield


def catch_dispatch(module: nn.Module) -> None:
    """Let the attentions of a module of diffusers be caught, whatever their backend."""
    processor = getattr(module, "processor", None)
    namespace = vars(sys.modules[type(processor).__module__])
    dispatch = namespace.get(DISPATCH)
    # Several modules share a file, whose function is replaced once.
    if dispatch is None or hasattr(dispatch, "dispatches"):
        return

    def caught(*args: Any, **kwargs: Any) -> Any:
        return _handle(dispatch, args, kwargs, heads_first=False)

    caught.dispatches = dispatch  # type: ignore[attr-defined]
    namespace[DISPATCH] = caught


class _CatchTorch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return _handle(func, args, kwargs or {}, heads_first=True)
        return func(*args, **kwargs or {})


def _handle(function: Any, args: Any, kwargs: Any, *, heads_first: bool) -> Any:
    """Call the innermost handler in place of the function; ``heads_first``: ``[B, H, L, D]``."""
    handler = _handlers[-1] if _handlers else None
    if handler is None:
        return function(*args, **kwargs)

    settings = dict(zip(NAMES, args, strict=False)) | kwargs
    q, k, v = (settings.pop(name) for name in NAMES[:3])
    mask = settings.pop("attn_mask", None)
    attention = Attention(function, settings, heads_first)
    to_ours = attention.transposed
    return to_ours(handler(attention, to_ours(q), to_ours(k), to_ours(v), mask))


@contextmanager
def _handling(handler: Handler | None) -> Iterator[None]:
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.pop()
