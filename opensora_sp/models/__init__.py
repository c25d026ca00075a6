"""STDiT models in plain torch, without process groups."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .blocks import STDiT3Block
from .conditions import Text
from .hook_points import Attend, Point
from .layers import CrossAttention, PatchEmbed3D
from .stdit3 import STDiT3
from .stdit_config import STDiT3Config
from .token_layout import PatchGrid

if TYPE_CHECKING:
    from .compile import compile_blocks
    from .registry import build_model
    from .stdit import STDiT, STDiT2

# Imported when they are used: a model loads neither the others nor the compiler.
WHEN_USED = {
    "STDiT": "stdit",
    "STDiT2": "stdit",
    "build_model": "registry",
    "compile_blocks": "compile",
}

__all__ = [
    "Attend",
    "CrossAttention",
    "PatchEmbed3D",
    "PatchGrid",
    "Point",
    "STDiT",
    "STDiT2",
    "STDiT3",
    "STDiT3Block",
    "STDiT3Config",
    "Text",
    "build_model",
    "compile_blocks",
]


def __getattr__(name: str) -> Any:
    if name not in WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{WHEN_USED[name]}"), name)
