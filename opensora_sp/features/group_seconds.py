"""Predicted seconds of a run's micro-batches in groups of ranks, by which steps are scheduled."""

from __future__ import annotations

import math
from collections.abc import Mapping

from opensora_sp.config import TrainConfig
from opensora_sp.data import MicroBatch
from opensora_sp.parallel.rank_groups import RankGroup

from .build import Work


class GroupSeconds:
    """``data.schedule.Seconds`` of a config: equal on all ranks, and quick once it is cached.

    Args:
        work: predicts seconds by the run's cost model.
        ranks_per_node: larger groups exchange over the network, and so do groups of one degree
            that does not divide it.
        least_ranks: by bucket, the fewest ranks whose memory its batches fit; 1 where it is not in.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        work: Work,
        *,
        ranks_per_node: int,
        least_ranks: Mapping[str, int] | None = None,
    ) -> None:
        self.work, self.ranks_per_node = work, ranks_per_node
        self.least_ranks = least_ranks or {}
        self.has_one_degree = isinstance(cfg.sp_size, int)
        self.degrees: Mapping[str, int] = cfg.sp_size if isinstance(cfg.sp_size, dict) else {}

    def __call__(self, micro_batch: MicroBatch, group: RankGroup) -> float:
        """Seconds of forward, recomputation and backward; infinity where it may not run."""
        degree = self.degrees.get(micro_batch.bucket, group.size)
        if group.size != degree or group.size < self.least_ranks.get(micro_batch.bucket, 1):
            return math.inf
        spans_nodes = group.size > self.ranks_per_node
        if self.has_one_degree:
            spans_nodes |= self.ranks_per_node % group.size > 0
        num_samples = len(micro_batch.ids)
        return self.work.seconds(micro_batch.shape, num_samples, group.size, spans_nodes)
