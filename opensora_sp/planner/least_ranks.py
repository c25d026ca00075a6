"""The fewest ranks whose memory a micro-batch fits."""

from __future__ import annotations

from collections.abc import Sequence

from opensora_sp.rank_groups import group_sizes, nested_groups

from .batches import BatchSpec
from .checkpointing import budget_of
from .run_estimator import RunEstimator


def least_ranks(
    run: RunEstimator, batch: BatchSpec, memory: float, sizes: Sequence[int]
) -> int | None:
    """The smallest group of ranks on which a micro-batch fits; None if it fits on none.

    Everything is recomputed if the config leaves the choice to the run. Inputs of blocks leave the
    device only where it would fit on no group otherwise.

    Args:
        memory: bytes of a device beside communicators.
        sizes: of the groups to choose from.
    """
    latents, budget = run.latents(batch), budget_of(memory)
    for levels in run.lowest_levels:
        for ranks in sorted(sizes):
            if run.peak(latents, ranks, levels).needed <= budget:
                return ranks
    return None


def ranks_of_bucket(name: str, batch: BatchSpec, run: RunEstimator, memory: float) -> int:
    """The ranks that share a bucket's batches: the config's degree, or with ``sp_size="auto"`` as
    few as the batch fits on, and all where it fits on none.
    """
    sp_size = run.cfg.sp_size
    if isinstance(sp_size, dict) and name in sp_size:
        return int(sp_size[name])
    if sp_size is None or isinstance(sp_size, int):
        return run.ranks

    sizes = group_sizes(nested_groups(run.num_gpus, run.gpus_per_node))
    return least_ranks(run, batch, memory, sizes) or max(sizes)
