"""The arithmetic of layouts, over many shapes and without processes."""

from __future__ import annotations

from itertools import accumulate, chain, groupby, pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_sp.models.packing import windows_of
from opensora_sp.models.token_layout import SPATIAL, TEMPORAL, PatchGrid, unpatchify
from opensora_sp.parallel.layout import (
    SPATIAL_ROWS,
    TEMPORAL_ROWS,
    BatchAxes,
    balanced_range,
    balanced_sizes,
    plan_exchange,
    rank_ranges,
    unit_ranges,
)

shapes = st.tuples(st.integers(1, 9), st.integers(1, 33), st.integers(1, 400), st.integers(1, 16))


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_ranges_cover_all_rows_and_differ_by_at_most_one(num_rows: int, num_ranks: int) -> None:
    ranges = [balanced_range(num_rows, num_ranks, rank) for rank in range(num_ranks)]
    assert ranges[0][0] == 0 and ranges[-1][1] == num_rows
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    sizes = balanced_sizes(num_rows, num_ranks)
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=100, deadline=None)
@given(shapes, st.sampled_from([1, 1, 2, 3]))
def test_a_switch_brings_every_token_to_its_place_and_back(
    shape: tuple[int, int, int, int], chunks: int
) -> None:
    B, T, S, P = shape
    axes = BatchAxes(B, T, S)
    tokens = torch.arange(B * T * S)
    spatial, temporal = tokens, tokens.view(B, T, S).transpose(1, 2).flatten()

    def shards(x: torch.Tensor, rows: int, length: int) -> list[torch.Tensor]:
        edges = [balanced_range(B * rows, P, rank) for rank in range(P)]
        return [x[start * length : stop * length] for start, stop in edges]

    def exchange(
        held: list[torch.Tensor], source: str, target: str, length: int
    ) -> list[torch.Tensor]:
        """The exchange by its plans, a chunk of each rank's rows at a time."""
        arrived = [[] for _ in range(P)]
        for chunk in range(chunks):
            plans = [
                plan_exchange(axes, source, target, P, rank, "cpu", chunk, chunks)
                for rank in range(P)
            ]
            own = []
            for x in held:
                start, stop = balanced_range(len(x) // length, chunks, chunk)
                own.append(x[start * length : stop * length])
            sent = [x[plan.pack].split(plan.send_splits) for x, plan in zip(own, plans)]
            for r, plan in enumerate(plans):  # what r expects from q is what q sends to r
                assert plan.recv_splits == [plans[q].send_splits[r] for q in range(P)]
                arrived[r].append((plan.unpack, torch.cat([sent[q][r] for q in range(P)])))

        results = []
        for parts in arrived:
            places = torch.cat([place for place, _ in parts])
            assert torch.equal(places.sort().values, torch.arange(len(places)))  # every place once
            results.append(
                torch.empty_like(places).index_copy_(0, places, torch.cat([x for _, x in parts]))
            )

        return results

    there = exchange(shards(spatial, T, S), SPATIAL_ROWS, TEMPORAL_ROWS, S)
    assert all(
        torch.equal(ours, wanted)
        for ours, wanted in zip(there, shards(temporal, S, T), strict=True)
    )
    back = exchange(there, TEMPORAL_ROWS, SPATIAL_ROWS, T)
    assert all(
        torch.equal(ours, wanted) for ours, wanted in zip(back, shards(spatial, T, S), strict=True)
    )
    if B % P == 0:
        for rank in range(P):
            assert (
                plan_exchange(axes, SPATIAL_ROWS, TEMPORAL_ROWS, P, rank, "cpu").sent_elsewhere(
                    rank
                )
                == 0
            )


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.integers(1, 6)] * 5), st.sampled_from(["b t h | s", "h | b t s", "b h | t s"])
)
def test_units_of_heads_get_every_entry_once(shape: tuple[int, ...], units: str) -> None:
    B, T, S, H, P = shape
    axes, source = BatchAxes(B, T, S, H), TEMPORAL_ROWS + " h"
    entries = torch.arange(B * S * T * H).view(B, S, T, H)
    order = ["bsth".index(axis) for axis in units.replace("|", "").split()]
    wanted = entries.permute(order).flatten()  # all units, one after the other
    num_units, size = (
        prod(getattr(axes, a) for a in units.split("|")[0].split()),
        prod(getattr(axes, a) for a in units.split("|")[1].split()),
    )
    plans = [plan_exchange(axes, source, units, P, rank, "cpu") for rank in range(P)]
    held = [
        entries.flatten(0, 1)[slice(*balanced_range(B * S, P, rank))].flatten() for rank in range(P)
    ]
    sent = [x[plan.pack].split(plan.send_splits) for x, plan in zip(held, plans, strict=True)]

    for rank, plan in enumerate(plans):
        start, stop = balanced_range(num_units, P, rank)
        arrived = torch.cat([sent[q][rank] for q in range(P)])
        ours = torch.empty_like(arrived).index_copy_(0, plan.unpack, arrived)
        assert torch.equal(ours, wanted[start * size : stop * size])


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)),  # B, T, H
    st.tuples(st.integers(1, 9), st.integers(1, 9)),  # lines and columns of patches
    st.tuples(st.sampled_from([-1, 1, 2, 3, 8]), st.integers(1, 4)),
    st.integers(1, 9),
    st.sampled_from(["b w | p t", "b w p | t", "b w h | p t", "h | b w p t"]),
    st.sampled_from(["b t | s", "b s | t", "b w p | t", "b w | p t"]),
)
def test_windows_get_every_token_once_whole_and_balanced(
    sizes: tuple, patches: tuple, kernel: tuple, P: int, units: str, source: str
) -> None:
    """Against an enumeration of all entries, one by one."""
    (B, T, H), S, windows = sizes, patches[0] * patches[1], windows_of(*patches, kernel)
    assert sorted(windows.order) == list(range(S)) and sum(windows.sizes) == S
    axes = BatchAxes(B, T, S, H, windows)
    source = source + (" h" if "h" in units else "")
    places = []
    for w, count in enumerate(windows.sizes):
        places += [dict(w=w, p=p) for p in range(count)]
    where = {s: dict(s=s) | place for s, place in zip(windows.order, places, strict=True)}
    entries = [
        dict(b=b, t=t, h=h, **where[s])
        for b, t, s, h in product(range(B), range(T), range(S), range(H if "h" in units else 1))
    ]

    def ordered(layout: str) -> list[dict]:
        return sorted(
            entries, key=lambda entry: [entry[axis] for axis in layout.replace("|", "").split()]
        )

    def held(layout: str) -> list[list[dict]]:
        return [ordered(layout)[start:stop] for start, stop in rank_ranges(axes, layout, P)]

    outer = units.split("|")[0].split()
    by_unit = [
        list(unit)
        for _, unit in groupby(ordered(units), key=lambda entry: [entry[axis] for axis in outer])
    ]
    numbers = unit_ranges(axes, units, P)
    for (first, last), mine in zip(numbers, held(units), strict=True):
        assert list(chain.from_iterable(by_unit[first:last])) == mine
    assert list(chain.from_iterable(range(*run) for run in numbers)) == list(range(len(by_unit)))
    largest = max(map(len, by_unit))
    assert all(abs(len(mine) - len(entries) / P) <= largest for mine in held(units))

    plans = [plan_exchange(axes, source, units, P, rank, "cpu") for rank in range(P)]
    sent = []
    for mine, plan in zip(held(source), plans, strict=True):
        edges = [0, *accumulate(plan.send_splits)]
        sent.append([[mine[i] for i in plan.pack[start:stop]] for start, stop in pairwise(edges)])
    for rank, plan in enumerate(plans):
        assert plan.recv_splits == [plans[q].send_splits[rank] for q in range(P)]
        arrived = list(chain.from_iterable(of_sender[rank] for of_sender in sent))
        assert [arrived[i] for i in plan.unpack.argsort()] == held(units)[rank]
    if B % P == 0 and "h" not in units:
        assert all(plan.sent_elsewhere(rank) == 0 for rank, plan in enumerate(plans))


def test_a_layout_names_every_axis_once() -> None:
    with pytest.raises(ValueError, match=r"got layout 'b t' for the axes \['b', 's', 't'\]"):
        plan_exchange(BatchAxes(1, 1, 1), "b t", "b s | t", 1, 0, "cpu")


sizes = st.tuples(*[st.integers(1, 7)] * 3)
kernels = st.none() | st.tuples(*[st.sampled_from([-1, 1, 2, 3])] * 2)
patches = st.tuples(*[st.integers(1, 3)] * 3)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3),
    sizes,
    patches,
    st.sampled_from([SPATIAL, TEMPORAL]),
    st.integers(1, 5),
    kernels,
)
def test_slices_of_all_ranks_are_the_slice_of_the_whole(
    B: int,
    size: tuple[int, int, int],
    patch: tuple[int, int, int],
    layout: str,
    P: int,
    kernel: tuple[int, int] | None,
) -> None:
    grid = PatchGrid(num_samples=B, latent_size=size, patch_size=patch, kernel=kernel)
    rows = grid.rows(layout)
    z = torch.randn(B, 2, *size)
    per_frame, per_position = torch.randn(B, size[0]), torch.randn(B, *size)
    parts = [rows.take(*balanced_range(rows.total, P, rank)) for rank in range(P)]

    for whole in (z, per_frame, per_position):
        assert torch.equal(torch.cat([part.slice(whole) for part in parts]), rows.slice(whole))
    assert rows.slice(z).shape == (rows.total, rows.length, grid.patch_volume * 2)
    assert (
        torch.cat([part.inside(z.device) for part in parts]).sum()
        == B * size[0] * size[1] * size[2]
    )
    assert sum(sum(part.tokens_per_sample()) for part in parts) == rows.total * rows.length
    assert torch.equal(unpatchify(rows.slice(z), rows), z)

    everywhere = per_frame[:, None, :, None, None].expand(B, 1, *size)
    assert torch.equal(unpatchify(rows.slice(per_frame), rows), everywhere)
    transposed, other = rows.transpose(rows.slice(z))
    assert torch.equal(transposed, other.slice(z)) and other == rows.transposed()
