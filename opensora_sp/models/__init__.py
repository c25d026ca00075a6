"""STDiT models in plain torch, without process groups."""

from .blocks import STDiT3Block
from .compile import compile_blocks
from .conditioning import Text, sample_numbers
from .config import STDiT2Config, STDiT3Config, STDiTConfig
from .embedders import PatchEmbed3D
from .hook_points import Attend, Gather, Point, Segment, Shard, Switch, Tokenwise
from .layers import CrossAttention
from .registry import build_model
from .stdit import STDiT
from .stdit2 import STDiT2
from .stdit3 import STDiT3
from .token_layout import PatchGrid, Rows

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
