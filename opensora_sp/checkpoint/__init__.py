"""Checkpoints and weights on disk: paths, saves, verification, and how models load them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .checkpoint_folder import verify
from .paths import find_weights

if TYPE_CHECKING:
    from .pretrained import from_pretrained, save_pretrained

__all__ = ["find_weights", "from_pretrained", "save_pretrained", "verify"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # On first use: a program that only saves tensors imports no model.
    from . import pretrained

    return getattr(pretrained, name)
