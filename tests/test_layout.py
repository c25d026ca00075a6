"""The arithmetic of layouts, over many shapes and without processes."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_sp.models.rows import SPATIAL, TEMPORAL, PatchGrid, unpatchify
from opensora_sp.parallel.layout import balanced_run, plan_switch, run_sizes

shapes = st.tuples(st.integers(1, 9), st.integers(1, 33), st.integers(1, 40), st.integers(1, 16))


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_runs_cover_all_rows_and_differ_by_at_most_one(num_rows: int, num_ranks: int) -> None:
    runs = [balanced_run(num_rows, num_ranks, rank) for rank in range(num_ranks)]
    assert runs[0][0] == 0 and runs[-1][1] == num_rows
    assert all(before[1] == after[0] for before, after in pairwise(runs))
    assert max(run_sizes(num_rows, num_ranks)) - min(run_sizes(num_rows, num_ranks)) <= 1


@settings(max_examples=150, deadline=None)
@given(shapes)
def test_a_switch_brings_every_token_to_its_place_and_back(shape: tuple[int, int, int, int]) -> None:
    B, T, S, P = shape
    tokens = torch.arange(B * T * S)
    spatial, temporal = tokens, tokens.view(B, T, S).transpose(1, 2).flatten()

    def shards(x: torch.Tensor, rows: int, length: int) -> list[torch.Tensor]:
        edges = [balanced_run(B * rows, P, rank) for rank in range(P)]
        return [x[start * length : stop * length] for start, stop in edges]

    def exchange(held: list[torch.Tensor], rows: int, length: int) -> list[torch.Tensor]:
        plans = [plan_switch(B, rows, length, P, rank, "cpu") for rank in range(P)]
        sent = [x[plan.pack].split(plan.send_splits) for x, plan in zip(held, plans)]
        for r, plan in enumerate(plans):  # what r expects from q is what q sends to r
            assert plan.recv_splits == [plans[q].send_splits[r] for q in range(P)]
        return [torch.cat([sent[q][r] for q in range(P)])[plan.unpack] for r, plan in enumerate(plans)]

    there = exchange(shards(spatial, T, S), T, S)
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(there, shards(temporal, S, T)))
    back = exchange(there, S, T)
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(back, shards(spatial, T, S)))
    if B % P == 0:
        assert all(plan_switch(B, T, S, P, rank, "cpu").sent_elsewhere(rank) == 0 for rank in range(P))


sizes = st.tuples(*[st.integers(1, 7)] * 3)
patches = st.tuples(*[st.integers(1, 3)] * 3)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), sizes, patches, st.sampled_from([SPATIAL, TEMPORAL]), st.integers(1, 5))
def test_slices_of_all_ranks_are_the_slice_of_the_whole(
    B: int, size: tuple[int, int, int], patch: tuple[int, int, int], layout: str, P: int
) -> None:
    grid = PatchGrid(num_samples=B, latent_size=size, patch_size=patch)
    rows = grid.rows(layout)
    z = torch.randn(B, 2, *size)
    per_frame, per_position = torch.randn(B, size[0]), torch.randn(B, *size)
    runs = [rows.take(*balanced_run(rows.total, P, rank)) for rank in range(P)]
    for whole in (z, per_frame, per_position):
        assert torch.equal(torch.cat([run.slice(whole) for run in runs]), rows.slice(whole))
    assert rows.slice(z).shape == (rows.total, rows.length, grid.patch_volume * 2)
    assert torch.cat([run.inside(z.device) for run in runs]).sum() == B * size[0] * size[1] * size[2]
    assert sum(sum(run.tokens_per_sample()) for run in runs) == rows.total * rows.length
    if layout == TEMPORAL:
        assert torch.equal(unpatchify(rows.slice(z), grid), z)
        everywhere = per_frame[:, None, :, None, None].expand(B, 1, *size)
        assert torch.equal(unpatchify(rows.slice(per_frame), grid), everywhere)
