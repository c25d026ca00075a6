"""Schedule of a step: the group of ranks that computes each micro-batch, so that all end together.

Groups of a family are disjoint or one lies inside the other (``rank_groups``). A rank computes the
micro-batches of its groups from the largest group to the smallest. The ranks of a group have the
same groups around theirs, so they begin its first micro-batch at the same time, and a rank ends
after the sum of the seconds of all micro-batches of its groups.

To find a short step, an end is assumed, and micro-batches are placed, the longest first: each in
the smallest group that it ends in by then, and among these in the one that is free first. Bisection
finds the earliest end for which all can be placed. This is the dual approximation of Mounié, Rapine
and Trystram (A 3/2-approximation algorithm for scheduling independent monotonic malleable tasks,
SIAM J. Comput. 2007), with list scheduling in place of their shelves. Exchanges of micro-batches
afterwards would shorten a step by less than 0.1 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from opensora_sp.parallel.rank_groups import RankGroup, group_sizes

from .sampler import BatchPlan, MicroBatch, RankBatches

Seconds = Callable[[MicroBatch, RankGroup], float]
"""Predicted seconds of a micro-batch in a group, the same for all groups of a size; infinity where
it does not fit their memory or may not run there."""
# A step that is shorter by less than this share is not looked for.
PRECISION = 0.002
# A step that is longer than any can be by less than this factor is taken.
CLOSE = 1.005


class Assigned(NamedTuple):
    """A micro-batch and the group that computes it."""

    micro_batch: MicroBatch
    group: RankGroup


def schedule(
    micro_batches: Sequence[MicroBatch], family: tuple[RankGroup, ...], seconds: Seconds
) -> list[Assigned]:
    """Assign each micro-batch of a step to a group of the family.

    The step is at most 0.5 % longer than one with groups of any one size, where the longest
    micro-batches come first, each in the group that is free first.

    Returns:
        Groups from large to small; in a group, micro-batches in the order in which they are passed.
        All ranks get the same, from the same numbers.

    Raises:
        ValueError: if no group may compute a micro-batch.
    """
    nested = _nested(family)
    groups = _shortest(nested, _table(micro_batches, nested, seconds))

    assigned = [
        Assigned(micro_batch, nested.groups[index])
        for micro_batch, index in zip(micro_batches, groups, strict=True)
    ]
    return sorted(assigned, key=lambda pair: (-pair.group.size, pair.group.start))


def busy_seconds(assigned: Sequence[Assigned], world_size: int, seconds: Seconds) -> np.ndarray:
    """Seconds in which each rank computes, float64 ``[world_size]``; the largest is the step's."""
    busy = np.zeros(world_size)
    for micro_batch, group in assigned:
        busy[group.start : group.stop] += seconds(micro_batch, group)
    return busy


class ScheduledBatches(RankBatches):
    """Sampler of one rank that may be in several groups, from large groups to small.

    A rank may have no micro-batch in a step, and ranks may have different numbers of them.

    Args:
        family, seconds: see ``schedule``.
    """

    def __init__(
        self,
        plan: BatchPlan,
        *,
        rank: int,
        family: tuple[RankGroup, ...],
        seconds: Seconds,
        **options: Any,
    ) -> None:
        super().__init__(plan, **options)
        self.rank, self.family, self.seconds = rank, family, seconds
        # Workers read a few steps ahead of the one that is computed.
        self.assigned = lru_cache(maxsize=128)(self._assigned)

    def _assigned(self, step: int) -> list[Assigned]:
        """All micro-batches of a step, with the groups that compute them."""
        return schedule(self.plan.step(step), self.family, self.seconds)

    def of_rank(self, step: int) -> list[Assigned]:
        return [assigned for assigned in self.assigned(step) if self.rank in assigned.group]


class _Nested:
    """The groups of a family, by their first rank, large before small.

    Attributes:
        sizes: of groups, ascending.
        size: int64 ``[G]``, the size of each group, as an index of ``sizes``.
        contains: bool ``[G, G]``, True where a group, by its row, is or contains another one.
    """

    def __init__(self, family: tuple[RankGroup, ...]) -> None:
        self.groups = sorted(family, key=lambda group: (group.start, -group.size))
        self.world_size = max(group.stop for group in family)
        self.sizes = group_sizes(family)
        self.size = np.array([self.sizes.index(group.size) for group in self.groups])
        self.contains = np.empty((len(family), len(family)), dtype=bool)
        for index, around in enumerate(self.groups):
            self.contains[index] = [group.is_inside(around) for group in self.groups]


_nested = lru_cache(maxsize=4)(_Nested)


def _table(micro_batches: Sequence[MicroBatch], nested: _Nested, seconds: Seconds) -> np.ndarray:
    """Seconds of each micro-batch in groups of each size, float64 ``[M, sizes]``."""
    # Groups of a size take equally long.
    one_of_size = dict(zip(nested.size.tolist(), nested.groups, strict=True))
    groups = [one_of_size[n] for n in range(len(nested.sizes))]
    table = np.empty((len(micro_batches), len(nested.sizes)))
    for row, micro_batch in enumerate(micro_batches):
        table[row] = [seconds(micro_batch, group) for group in groups]
        if np.isinf(table[row]).all():
            kind = f"the bucket {micro_batch.bucket}" if micro_batch.bucket else micro_batch.shape
            raise ValueError(
                f"got a micro-batch of {len(micro_batch.ids)} clips of {kind} that no group of up "
                f"to {nested.sizes[-1]} ranks can compute; "
                "expected one with enough memory, of a degree that sp_size allows; lower the "
                "bucket's batch size, raise grad_checkpoint, or start more processes"
            )
    return table


def _shortest(nested: _Nested, table: np.ndarray) -> list[int]:
    """The group of each micro-batch, in the shortest step that is found."""
    # No step is shorter than its work divided by the ranks, or than its longest micro-batch.
    work = (table * nested.sizes).min(axis=1).sum() / nested.world_size
    least = max(work, table.min(axis=1).max(initial=0.0))
    one_by_one = np.where(np.isinf(table), 0.0, table).max(axis=1).sum() * (1 + PRECISION)

    best: _Placed | None = None
    for sizes in _choices(len(nested.sizes)):
        if best is not None and best.end < least * CLOSE:
            break
        limit = one_by_one if best is None else best.end
        best = _earliest(nested, table, sizes, least, limit) or best
    assert best is not None
    return best.groups


def _choices(num_sizes: int) -> Iterator[range]:
    """Sizes to choose from: all from one on, and one alone, which is a fixed degree."""
    for first in range(num_sizes):
        yield range(first, num_sizes)
        yield range(first, first + 1)


class _Placed(NamedTuple):
    """The group of each micro-batch, as an index of ``_Nested.groups``, and when all have ended."""

    groups: list[int]
    end: float


def _earliest(
    nested: _Nested, table: np.ndarray, sizes: range, least: float, limit: float
) -> _Placed | None:
    """Bisect between ``least`` and ``limit`` for the earliest end; None where all is later."""
    # The longest first, in the smallest groups; before these what does not fit them.
    order = np.lexsort((-table.min(axis=1), -table[:, sizes.start])).tolist()
    best, too_early, end = None, least, limit
    # Placing is not monotonic in the end, so the best one so far is kept.
    while end > too_early:
        placed = _place(nested, table, order, sizes, end)
        if placed is None:
            too_early = end
        else:
            best = placed
        if best is None:
            break
        end = min((too_early + best.end) / 2, best.end * (1 - PRECISION))
    return best


def _place(
    nested: _Nested, table: np.ndarray, order: list[int], sizes: range, end: float
) -> _Placed | None:
    """Place micro-batches so that all have ended by ``end``; None where one finds no group.

    ``table`` has the seconds of each micro-batch in groups of each size.
    """
    # Smaller groups come first, whenever they are free.
    preferred = np.where(np.isin(nested.size, sizes), nested.size * 2 * end, np.inf)
    # When the last rank of each group is free.
    free = np.zeros(len(nested.groups))
    groups = [0] * len(order)
    for row in order:
        taken = table[row, nested.size]
        key = np.where(free + taken <= end, preferred + free, np.inf)
        index = int(key.argmin())
        if np.isinf(key[index]):
            return None

        groups[row] = index
        # Groups inside this one wait for it, and groups around it for its last rank.
        free[nested.contains[index]] += taken[index]
        around = nested.contains[:, index]
        free[around] = np.maximum(free[around], free[index])
    return _Placed(groups, float(free.max()))
