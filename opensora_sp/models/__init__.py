"""STDiT models in plain torch. Nothing in here knows of processes or groups."""

from .points import Attend, Gather, Point, Rowwise, Segment, Shard, Switch
from .registry import build_model
from .rows import PatchGrid, Rows
from .stdit3 import STDiT3, STDiT3Config

__all__ = [
    "Attend",
    "Gather",
    "PatchGrid",
    "Point",
    "Rows",
    "Rowwise",
    "STDiT3",
    "STDiT3Config",
    "Segment",
    "Shard",
    "Switch",
    "build_model",
]
