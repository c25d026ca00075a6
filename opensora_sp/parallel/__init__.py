"""Sequence parallelism in plain torch: the mesh, the arithmetic of layouts, and what is hung on a model."""

from .ledger import CommLedger
from .mesh import SequenceMesh, check_sp_size
from .wrap import Shard, parallelize, unwrap

__all__ = [
    "CommLedger",
    "SequenceMesh",
    "Shard",
    "check_sp_size",
    "parallelize",
    "unwrap",
]
