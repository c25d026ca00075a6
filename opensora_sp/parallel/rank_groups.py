"""Groups of neighbouring ranks that may share a micro-batch: the family of a run.

A *family* is the set of groups that a run makes at its start. With a fixed sequence-parallel
degree its groups are disjoint (``fixed_groups``). Otherwise it is a binary tree of ranges
(``nested_groups``), so that two groups are disjoint or one lies inside the other. Then ranks that
process their groups from the largest to the smallest never wait for each other in a cycle
(docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class RankGroup(NamedTuple):
    """World ranks ``[start, stop)``; ``rank in group`` asks for a member."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The sequence-parallel degree of a micro-batch of this group."""
        return self.stop - self.start

    @property
    def ranks(self) -> range:
        return range(self.start, self.stop)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def is_inside(self, other: RankGroup) -> bool:
        """True if all its ranks are ranks of ``other``."""
        return other.start <= self.start and self.stop <= other.stop

    def spans_nodes(self, ranks_per_node: int) -> bool:
        """True if it lies on more than one node."""
        return self.start // ranks_per_node != (self.stop - 1) // ranks_per_node

    def __str__(self) -> str:
        if self.size == 1:
            return f"rank {self.start}"
        return f"ranks {self.start}-{self.stop - 1}"


def fixed_groups(world_size: int, sp_size: int) -> tuple[RankGroup, ...]:
    """All groups of ``sp_size`` neighbouring ranks; ``sp_size`` divides ``world_size``."""
    starts = range(0, world_size, sp_size)
    return tuple(RankGroup(start, start + sp_size) for start in starts)


def nested_groups(world_size: int, ranks_per_node: int) -> tuple[RankGroup, ...]:
    """The world, divided in two again and again, down to single ranks: largest groups first.

    A range on several nodes is divided between nodes, at the largest power of two of nodes, and a
    range within a node at the largest power of two of ranks. 7 ranks are divided into 4 + 3, and 24
    on nodes of 8 into 16 + 8. So a rank is in at most ``ceil(log2(nodes)) +
    ceil(log2(ranks_per_node)) + 1`` groups.

    Args:
        world_size: the number of ranks, 1 or more.
        ranks_per_node: how many neighbouring ranks share a node; the last node may have fewer.
    """
    groups = [RankGroup(0, world_size)]

    # The list grows while it is read: the halves of a group come after it.
    for group in groups:
        if group.size > 1:
            middle = _middle(group, ranks_per_node)
            groups += [RankGroup(group.start, middle), RankGroup(middle, group.stop)]

    # The order in which all ranks create process groups and run micro-batches; see
    # docs/architecture.md, "No deadlock".
    return tuple(sorted(groups, key=lambda group: (-group.size, group.start)))


def groups_with(rank: int, family: Iterable[RankGroup]) -> tuple[RankGroup, ...]:
    """The groups that have this rank as a member, in the order of the family."""
    return tuple(group for group in family if rank in group)


def group_sizes(family: Iterable[RankGroup]) -> list[int]:
    """The sequence-parallel degrees that a family offers, ascending."""
    return sorted({group.size for group in family})


def within_nodes(family: Iterable[RankGroup], ranks_per_node: int) -> tuple[RankGroup, ...]:
    """Disjoint groups with all ranks: the largest that lie on one node, in order of their ranks.

    With groups of a fixed size these are all of them, also where they lie on several nodes.
    """
    family = tuple(family)
    smallest = min(group.size for group in family)
    chosen: list[RankGroup] = []
    for group in sorted(family, key=lambda group: -group.size):
        is_inside = any(group.is_inside(larger) for larger in chosen)
        may_span = group.size == smallest
        if not is_inside and (may_span or not group.spans_nodes(ranks_per_node)):
            chosen.append(group)
    return tuple(sorted(chosen))


def check_degrees(sp_size: object) -> None:
    """Raise ValueError unless ``sp_size`` of a training is a number, "auto" or a map by bucket."""
    degrees = sp_size.values() if isinstance(sp_size, Mapping) else [sp_size]
    are_numbers = all(type(degree) is int and degree > 0 for degree in degrees)
    if sp_size != "auto" and not are_numbers:
        raise ValueError(
            f"got sp_size = {sp_size!r}; expected a number of ranks from 1 on, 'auto', or a map of "
            "buckets to such numbers, such as {'720p x 102': 4}; change sp_size"
        )


def check_degrees_in(degrees: Mapping[str, int], world_size: int, ranks_per_node: int) -> None:
    """Raise ValueError unless each bucket's degree is the size of a nested group of the world."""
    sizes = group_sizes(nested_groups(world_size, ranks_per_node))
    misfits = {name: degree for name, degree in degrees.items() if degree not in sizes}
    if misfits:
        raise ValueError(
            f"got the degrees {misfits} in sp_size with {world_size} processes, {ranks_per_node} "
            f"on a node; expected sizes of the groups that these form, of {sizes}; change the "
            "degrees or the number of processes"
        )


def _middle(group: RankGroup, ranks_per_node: int) -> int:
    """The rank at which a group is divided.

    Groups that are divided at nodes start at the first rank of one.
    """
    # Halves that begin in the middle of a node would send over the network what fits inside.
    unit = ranks_per_node if group.spans_nodes(ranks_per_node) else 1
    units = -(-group.size // unit)
    # The largest power of two that is less than these.
    return group.start + unit * (1 << (units - 1).bit_length() - 1)
