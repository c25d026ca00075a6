"""Assign micro-batches to ranks: the sampler of a rank, with the group that computes each."""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Any

from opensora_sp.config import TrainConfig
from opensora_sp.data import BatchPlan, ReplicaBatches, ScheduledBatches
from opensora_sp.data.sampler import RankBatches
from opensora_sp.features.build import GroupSeconds, Work
from opensora_sp.features.sharded import ShardedEncoder
from opensora_sp.parallel import SequenceMesh
from opensora_sp.planner.batches import batches_by_name
from opensora_sp.planner.bucket_levels import least_ranks
from opensora_sp.planner.run_estimator import RunEstimator

from .memory_fit import buckets_with_clips, degrees_of_bucket, estimator_of

logger = logging.getLogger(__name__)


def make_rank_batches(
    cfg: TrainConfig,
    plan: BatchPlan,
    encoder: ShardedEncoder,
    work: Work,
    *,
    start: int,
    reserved: int,
) -> RankBatches:
    """The sampler of this rank, from step ``start`` on. Collective.

    Args:
        encoder: of the run; its mesh has the groups.
        work: by which times are predicted.
        reserved: bytes of the device that encoders take.
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

    options: dict[str, Any] = dict(ranks_per_node=mesh.ranks_per_node)
    # The memory of a CPU belongs to all ranks of a host, so a group has no more than a rank.
    if len(mesh.own) > 1 and (encoder.device.type == "cuda" or cfg.grad_checkpoint == "auto"):
        run = estimator_of(cfg, mesh, encoder.device, reserved, work.options)
        options["least_ranks"] = _least_ranks(cfg, mesh, run, buckets_with_clips(plan))
    return ScheduledBatches(
        plan,
        **span,
        rank=mesh.rank,
        family=mesh.family,
        seconds=GroupSeconds(cfg, work, **options),
        request_of=encoder.request,
    )


def _least_ranks(
    cfg: TrainConfig, mesh: SequenceMesh, run: RunEstimator, buckets: Container[str] | None = None
) -> dict[str, int]:
    """By bucket, the fewest ranks whose memory its batches fit into.

    Args:
        buckets: names of the buckets with clips; None for all.

    Raises:
        ValueError: on all ranks, if the batches of a bucket fit on no group that they may run on.
    """
    least: dict[str, int] = {}
    lacking: list[str] = []
    for name, batch in batches_by_name(cfg).items():
        if buckets is not None and name not in buckets:
            continue
        sizes = degrees_of_bucket(cfg, mesh, name)
        ranks = least_ranks(run, batch, sizes)
        if ranks is None:
            plural = "s" * (max(sizes) > 1)
            lacking.append(f"{name} ({batch.batch_size} clips on {max(sizes)} rank{plural})")
        else:
            least[name if cfg.bucket_config is not None else ""] = ranks

    # All buckets at once, so that one start shows everything to change.
    if lacking:
        raise ValueError(
            f"got {run.memory / 1e9:.2f} GB of a device, into which no batch of these fits: "
            f"{', '.join(lacking)}; expected batches that fit on a group of ranks; lower their "
            "batch sizes or raise their degrees in sp_size (opensora-sp plan CONFIG --fit "
            f"{run.memory / 1e9:.0f}GB chooses both), set grad_checkpoint='auto', or start more "
            "processes"
        )
    several = [f"{name or 'a step'}: {ranks}" for name, ranks in least.items() if ranks > 1]
    if several:
        logger.info("fewest ranks that batches fit on: %s", ", ".join(several))
    return least
