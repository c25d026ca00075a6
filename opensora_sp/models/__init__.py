"""STDiT models in plain torch, without process groups."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .blocks import STDiT3Block
from .conditions import Text, sample_numbers
from .hook_points import Attend, Gather, Point, Segment, Shard, Switch, Tokenwise
from .layers import CrossAttention, PatchEmbed3D
from .stdit3 import STDiT3
from .stdit_config import STDiT2Config, STDiT3Config, STDiTConfig
from .token_layout import PatchGrid, Rows

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
    "Gather",
    "PatchEmbed3D",
    "PatchGrid",
    "Point",
    "Rows",
    "STDiT",
    "STDiT2",
    "STDiT2Config",
    "STDiT3",
    "STDiT3Block",
    "STDiT3Config",
    "STDiTConfig",
    "Segment",
    "Shard",
    "Switch",
    "Text",
    "Tokenwise",
    "build_model",
    "compile_blocks",
    "sample_numbers",
]


def __getattr__(name: str) -> Any:
    if name not in WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{WHEN_USED[name]}"), name)
