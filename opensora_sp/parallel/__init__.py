"""Sequence parallelism in plain torch: the mesh, the arithmetic of layouts, and what is hung on a model."""

from .ledger import CommLedger
from .mesh import SequenceMesh, check_sp_size
from .wrap import SequenceParallel, Shard, parallelize, sequence_parallel, unwrap

__all__ = [
    "CommLedger",
    "SequenceMesh",
    "SequenceParallel",
    "Shard",
    "check_sp_size",
    "parallelize",
    "sequence_parallel",
    "unwrap",
]
