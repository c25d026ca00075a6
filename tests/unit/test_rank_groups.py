"""The groups of ranks that a run makes at its start."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_sp.parallel.rank_groups import (
    RankGroup,
    check_degrees,
    fixed_groups,
    groups_with,
    nested_groups,
    within_nodes,
)

worlds = st.tuples(st.integers(1, 70), st.integers(1, 16))


def halves_of(group: tuple[int, int], world_size: int, ranks_per_node: int) -> list[int]:
    """The sizes of the two parts of a group."""
    family = nested_groups(world_size, ranks_per_node)
    inside = [one for one in family if one.is_inside(RankGroup(*group)) and one != group]
    halves = [
        one for one in inside if not any(one.is_inside(other) for other in inside if other != one)
    ]
    return [one.size for one in halves]


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "halves"),
    [
        (2, 8, [1, 1]),
        (3, 8, [2, 1]),
        (6, 8, [4, 2]),
        (7, 8, [4, 3]),
        (8, 8, [4, 4]),
        (16, 8, [8, 8]),
        (24, 8, [16, 8]),
        (12, 6, [6, 6]),
        (10, 8, [8, 2]),
    ],
)
def test_the_world_is_divided_between_nodes_first(
    world_size: int, ranks_per_node: int, halves: list[int]
) -> None:
    assert halves_of((0, world_size), world_size, ranks_per_node) == halves


def test_a_node_is_divided_at_the_largest_power_of_two() -> None:
    assert halves_of((6, 12), 12, 6) == [4, 2]
    assert halves_of((4, 7), 7, 8) == [2, 1]


@settings(deadline=None)
@given(worlds)
def test_two_groups_are_disjoint_or_nested(world: tuple[int, int]) -> None:
    family = nested_groups(*world)

    for one, other in pairwise(family):
        assert one.size >= other.size
    for rank in range(world[0]):
        own = groups_with(rank, family)
        assert own[0] == (0, world[0])
        assert own[-1] == (rank, rank + 1)
        # A chain: each contains the next.
        assert all(inner.is_inside(outer) for outer, inner in pairwise(own))


@settings(deadline=None)
@given(worlds)
def test_every_rank_has_few_groups(world: tuple[int, int]) -> None:
    world_size, ranks_per_node = world
    family = nested_groups(world_size, ranks_per_node)
    nodes = ceil(world_size / ranks_per_node)
    limit = ceil(log2(nodes)) + ceil(log2(min(ranks_per_node, world_size))) + 1

    assert len(set(family)) == len(family) == 2 * world_size - 1
    assert max(len(groups_with(rank, family)) for rank in range(world_size)) <= limit


@settings(deadline=None)
@given(worlds)
def test_a_group_on_several_nodes_has_whole_nodes(world: tuple[int, int]) -> None:
    world_size, ranks_per_node = world

    for group in nested_groups(world_size, ranks_per_node):
        nodes = {rank // ranks_per_node for rank in group.ranks}
        assert group.spans_nodes(ranks_per_node) == (len(nodes) > 1)
        if len(nodes) > 1:
            assert group.start % ranks_per_node == 0
            assert group.stop % ranks_per_node == 0 or group.stop == world_size


@pytest.mark.parametrize(
    ("family", "ranks_per_node", "wanted"),
    [
        (nested_groups(8, 8), 8, [(0, 8)]),
        (nested_groups(24, 8), 8, [(0, 8), (8, 16), (16, 24)]),
        (nested_groups(10, 8), 8, [(0, 8), (8, 10)]),
        (nested_groups(3, 1), 1, [(0, 1), (1, 2), (2, 3)]),
        (fixed_groups(4, 2), 8, [(0, 2), (2, 4)]),
        # A replica is not divided, although it lies on two nodes.
        (fixed_groups(8, 4), 2, [(0, 4), (4, 8)]),
    ],
)
def test_the_largest_groups_within_nodes(
    family: tuple[RankGroup, ...], ranks_per_node: int, wanted: list[tuple[int, int]]
) -> None:
    assert list(within_nodes(family, ranks_per_node)) == wanted


@pytest.mark.parametrize("sp_size", [1, 8, "auto", {"720p x 102": 4}, {}])
def test_degrees_of_a_training(sp_size: object) -> None:
    check_degrees(sp_size)


@pytest.mark.parametrize("sp_size", [0, -1, True, 2.0, "all", None, {"720p x 102": 0}, [2]])
def test_other_degrees_are_refused(sp_size: object) -> None:
    with pytest.raises(ValueError, match=r"got sp_size = .*; expected a number of ranks"):
        check_degrees(sp_size)
