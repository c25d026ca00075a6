"""``grad_checkpoint="auto"`` for all batches of a bucket: what their blocks keep.

They are planned together: the whole batch at the bucket's largest size decides for all of them, so
that a run traces a few shapes at its start and none in its steps. A smaller last batch of an epoch
may need more where ranks share it by rows and the whole one by clips, so it is looked at as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from opensora_sp.data.buckets import Buckets
from opensora_sp.resolutions import SIZES

from .batches import BatchSpec, batches_by_name
from .least_ranks import least_ranks
from .run_estimator import Memory, RunEstimator


@dataclass(frozen=True)
class BucketLevels:
    """What blocks keep in the batches of a bucket on ``ranks`` that share them.

    Attributes:
        name: of the bucket.
        latents: shapes ``(B, c, frames, height, width)`` of its whole batches, one for each size.
        levels: of each block (``models/recompute.py``).
        pinned: bytes of the host for the inputs of blocks.
        text: for the log.
    """

    name: str
    ranks: int
    latents: list[tuple[int, ...]]
    levels: list[int]
    pinned: int
    text: str

    @property
    def num_samples(self) -> int:
        """B, of whole batches."""
        return self.latents[0][0]

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """``(c, frames, height, width)`` of a clip, for each size."""
        return [latents[1:] for latents in self.latents]


def plan_bucket(
    run: RunEstimator, name: str, sizes: Sequence[int], memory: float
) -> Iterator[BucketLevels]:
    """The levels of a bucket's batches in groups of each size on which they fit.

    Args:
        name: of the bucket; of a config without buckets that of ``batches_by_name``.
        sizes: of the groups that may compute them, of which those with less memory than the whole
            batch takes are left out where there are several.
        memory: bytes of a device that training may take.
    """
    batch = batches_by_name(run.cfg)[name]
    latents = sorted(set(_latents(run, _all_sizes(run, name, batch))))
    if not latents:
        return
    largest = max(latents, key=lambda one: run.shape_of(one).tokens)

    least = min(sizes)
    if len(sizes) > 1:
        # As a run excludes groups from its schedule.
        least = least_ranks(run, batch, memory, sizes) or max(sizes)
    for ranks in sorted(sizes):
        if ranks >= least:
            found = _lowest(run, largest, ranks)
            text = found.describe()
            yield BucketLevels(name, ranks, latents, found.levels, found.pinned, text)


def _all_sizes(run: RunEstimator, name: str, batch: BatchSpec) -> Iterator[BatchSpec]:
    """The bucket's batches at all aspect ratios of its resolution."""
    config = getattr(run.cfg, "bucket_config", None)
    if config is None:
        yield batch
        return
    (entry,) = [one for one in Buckets.of(config).kept if one.name == name]
    for size in SIZES[entry.resolution].values():
        yield replace(batch, image_size=size)


def _latents(run: RunEstimator, batches: Iterable[BatchSpec]) -> Iterator[tuple[int, ...]]:
    """Shapes of latents, without those of sizes that the autoencoder refuses: no clip has them."""
    for batch in batches:
        with suppress(ValueError):
            yield run.latents(batch)


def _lowest(run: RunEstimator, latents: tuple[int, ...], ranks: int) -> Memory:
    """Memory of a batch, or of one with a clip less where that lets blocks keep less."""
    whole = run.memory(latents, ranks, brief=True)
    num_clips, *shape = latents
    if ranks == 1 or num_clips % ranks:
        return whole
    shorter = run.memory((num_clips - 1, *shape), ranks, brief=True)
    return min(whole, shorter, key=lambda one: sum(one.levels))
