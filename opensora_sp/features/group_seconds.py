"""Predicted seconds of a run's micro-batches in groups of ranks, by which steps are scheduled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

from opensora_sp.config import TrainConfig
from opensora_sp.data import ClipShape, MicroBatch
from opensora_sp.parallel import Options
from opensora_sp.parallel.cost_model import BETWEEN_NODES, H100, INSIDE_NODE
from opensora_sp.planner.sharing import busiest_work
from opensora_sp.planner.traffic import traffic
from opensora_sp.rank_groups import RankGroup

from .build import Work

PASSES = 4  # forward, the same again in backward, and twice as much for the gradients


class GroupSeconds:
    """``data.schedule.Seconds`` of a config: equal on all ranks, and quick once it is cached.

    Args:
        work: tokens of clips.
        ranks_per_node: larger groups exchange over the network.
        least_ranks: the fewest ranks whose memory a micro-batch fits.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        work: Work,
        *,
        ranks_per_node: int,
        least_ranks: Callable[[MicroBatch], int] = lambda micro_batch: 1,
    ) -> None:
        self.work, self.ranks_per_node, self.least_ranks = work, ranks_per_node, least_ranks
        self.options = Options(**dict(cfg.sequence_parallel))
        self.degrees: Mapping[str, int] = cfg.sp_size if isinstance(cfg.sp_size, dict) else {}
        self._cached = lru_cache(maxsize=None)(self._seconds)

    def __call__(self, micro_batch: MicroBatch, group: RankGroup) -> float:
        """Seconds of forward, recomputation and backward; infinity where it may not run."""
        degree = self.degrees.get(micro_batch.bucket, group.size)
        if group.size != degree or group.size < self.least_ranks(micro_batch):
            return math.inf
        return self._cached(micro_batch.shape, len(micro_batch.ids), group.size)

    def _seconds(self, clip: ClipShape, num_samples: int, ranks: int) -> float:
        shape = self.work.shape_of(clip, num_samples)
        seconds = PASSES * busiest_work(shape, self.options, ranks) / H100.flops
        if ranks == 1:
            return seconds

        sent = traffic(
            shape, self.options, ranks, element_size=2, checkpointing=True, training=True
        )
        link = BETWEEN_NODES if ranks > self.ranks_per_node else INSIDE_NODE
        return seconds + sent.busiest / link.bandwidth
