"""Sequence parallelism in plain torch: mesh, layouts, strategies, hooks attached to a model."""

from .communication import CommLedger, CommTimer
from .engine import Shard
from .mesh import SequenceMesh, check_sp_size
from .options import Options
from .parallelize import held_rows, parallelize, unwrap
from .shard_plan import ShardPlan, register_plan
from .shutdown import closing_process_group, drain_process_group, shutdown_process_group
from .token_plan import Cut, TokenPlan

__all__ = [
    "CommLedger",
    "CommTimer",
    "Cut",
    "Options",
    "SequenceMesh",
    "Shard",
    "ShardPlan",
    "TokenPlan",
    "check_sp_size",
    "closing_process_group",
    "drain_process_group",
    "held_rows",
    "parallelize",
    "register_plan",
    "shutdown_process_group",
    "unwrap",
]
