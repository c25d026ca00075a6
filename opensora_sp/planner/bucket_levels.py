"""The buckets of a config on their ranks: the fewest that a batch fits on, and with
``grad_checkpoint="auto"`` what blocks keep.

All is planned when a run starts. The whole batch at a bucket's largest size decides for the
bucket. A smaller last batch of an epoch may need more where ranks share it by rows and the whole
one by clips, so it is looked at as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from opensora_sp.data.buckets import BatchSpec, Buckets
from opensora_sp.data.resolutions import SIZES
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.rank_groups import group_sizes, nested_groups

from .run_estimator import RunEstimator


@dataclass(frozen=True)
class BucketLevels:
    """Levels of blocks in the batches of a bucket on ``ranks`` that share them.

    Attributes:
        shape: of the largest whole batch.
        levels: of each block (``models/recompute.py``).
    """

    name: str
    ranks: int
    shape: BatchShape
    levels: list[int]
    text: str

    def contains(self, shape: BatchShape, ranks: int) -> bool:
        """True if a batch on so many ranks has no more samples, frames and patches of a frame."""
        return (
            ranks == self.ranks
            and shape.num_samples <= self.shape.num_samples
            and shape.frames <= self.shape.frames
            and shape.patches <= self.shape.patches
        )


def levels_for(planned: Iterable[BucketLevels], shape: BatchShape, ranks: int) -> list[int] | bool:
    """As ``set_grad_checkpoint`` takes it: the levels of the smallest planned batch that contains
    this one; True, which recomputes all, if none does.
    """
    containing = [bucket for bucket in planned if bucket.contains(shape, ranks)]
    if not containing:
        return True
    return min(containing, key=lambda bucket: bucket.shape.tokens).levels


def plan_bucket(run: RunEstimator, name: str, sizes: Sequence[int]) -> Iterator[BucketLevels]:
    """The levels of a bucket's batches in groups of each size on which they fit.

    Args:
        name: of the bucket; of a config without buckets as in ``cfg.batches()``.
        sizes: of the groups that may compute them, of which those with less memory than the whole
            batch takes are left out where there are several.
    """
    batch = run.cfg.batches()[name]
    latents = max(_latents(run, name, batch), key=lambda latents: run.shape_of(latents).tokens)
    # As a run excludes groups from its schedule.
    least = (least_ranks(run, batch, sizes) or max(sizes)) if len(sizes) > 1 else min(sizes)
    for ranks in sorted(sizes):
        if ranks >= least:
            memories = [run.memory_of(latents, ranks)]
            if ranks > 1 and latents[0] % ranks == 0:
                memories.append(run.memory_of((latents[0] - 1, *latents[1:]), ranks))
            memory = min(memories, key=lambda memory: sum(memory.levels))
            shape = run.shape_of(latents)
            yield BucketLevels(name, ranks, shape, memory.levels, memory.describe())


def _latents(run: RunEstimator, name: str, batch: BatchSpec) -> Iterator[tuple[int, ...]]:
    """Shapes of a bucket's latents at each aspect ratio that the autoencoder takes."""
    sizes: Iterable[tuple[int, int]] = [batch.image_size]
    config = getattr(run.cfg, "bucket_config", None)
    if config is not None:
        resolutions = {entry.name: entry.resolution for entry in Buckets.of(config).kept}
        sizes = SIZES[resolutions[name]].values()
    for size in sizes:
        with suppress(ValueError):
            yield run.latents(replace(batch, image_size=size))


def least_ranks(run: RunEstimator, batch: BatchSpec, sizes: Sequence[int]) -> int | None:
    """The smallest group of ranks on which a micro-batch fits; None if it fits on none.

    Everything is recomputed if the config leaves the choice to the run. Inputs of blocks leave the
    device only where it would fit on no group otherwise.
    """
    latents = run.latents(batch)
    for levels in run.lowest_levels:
        for ranks in sorted(sizes):
            if run.peak(latents, ranks, levels).needed <= run.budget:
                return ranks
    return None


def ranks_of_bucket(name: str, batch: BatchSpec, run: RunEstimator) -> int:
    """The ranks that share a bucket's batches: the config's degree, or with ``sp_size="auto"`` as
    few as the batch fits on, and all where it fits on none.
    """
    sp_size = run.cfg.sp_size
    if isinstance(sp_size, dict) and name in sp_size:
        return int(sp_size[name])
    if sp_size is None or isinstance(sp_size, int):
        return run.ranks

    sizes = group_sizes(nested_groups(run.num_gpus, run.gpus_per_node))
    return least_ranks(run, batch, sizes) or max(sizes)
