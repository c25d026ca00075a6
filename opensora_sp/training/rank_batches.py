"""Which micro-batches a rank computes, and in which group."""

from __future__ import annotations

from typing import Any

from opensora_sp.config import TrainConfig
from opensora_sp.data import Assigned, BatchPlan, ReadRequest, ReplicaBatches, ScheduledBatches
from opensora_sp.data.sampler import RankBatches
from opensora_sp.features.build import Work
from opensora_sp.features.group_seconds import GroupSeconds
from opensora_sp.features.sharded import ShardedEncoder


def make_rank_batches(
    cfg: TrainConfig, plan: BatchPlan, encoder: ShardedEncoder, work: Work, *, start: int
) -> RankBatches:
    """The sampler of this rank, from step ``start`` on.

    Args:
        encoder: of the run; its mesh has the groups.
        work: by which times are predicted.
    """
    mesh, span = encoder.mesh, dict[str, Any](start=start, stop=cfg.max_steps)
    if not cfg.schedules_groups:
        return ReplicaBatches(
            plan,
            **span,
            replica=mesh.dp_rank,
            num_replicas=mesh.dp_size,
            request_of=encoder.request,
        )

    def request_of(assigned: Assigned) -> ReadRequest:
        request = encoder.request(assigned.micro_batch, assigned.group)
        return request._replace(group=assigned.group)

    return ScheduledBatches(
        plan,
        **span,
        rank=mesh.rank,
        family=mesh.family,
        seconds=GroupSeconds(cfg, work, ranks_per_node=mesh.ranks_per_node),
        request_of=request_of,
    )
