"""STDiT models in plain torch, without process groups."""

from .compile import compile_blocks
from .conditioning import Text, sample_numbers
from .config import STDiT2Config, STDiT3Config, STDiTConfig
from .hook_points import Attend, Gather, Point, Rowwise, Segment, Shard, Switch
from .registry import build_model
from .stdit import STDiT
from .stdit2 import STDiT2
from .stdit3 import STDiT3
from .token_layout import PatchGrid, Rows

__all__ = [
    "Attend",
    "Gather",
    "PatchGrid",
    "Point",
    "Rows",
    "Rowwise",
    "STDiT",
    "STDiT2",
    "STDiT2Config",
    "STDiT3",
    "STDiT3Config",
    "STDiTConfig",
    "Segment",
    "Shard",
    "Switch",
    "Text",
    "build_model",
    "compile_blocks",
    "sample_numbers",
]
