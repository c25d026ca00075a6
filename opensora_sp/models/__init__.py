"""STDiT models in plain torch. Nothing in here knows of processes or groups."""

from .compile import compile_blocks
from .conditioning import Text, sample_numbers
from .hook_points import Attend, Gather, Point, Rowwise, Segment, Shard, Switch
from .registry import build_model
from .stdit import STDiT, STDiTConfig
from .stdit2 import STDiT2, STDiT2Config
from .stdit3 import STDiT3, STDiT3Config
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
