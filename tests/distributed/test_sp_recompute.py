"""Selective gradient checkpointing with sequence parallelism, in float64 against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from parity_cases import DEPTH, FULL, Case, assert_one_process_result
from ranks import run_ranks

from opensora_sp.parallel import SequenceMesh

pytestmark = pytest.mark.core
CLIP = Case((1, 7, 5, 9))  # at least two frames on each rank
IMAGE = Case((1, 1, 4, 3))  # heads are exchanged inside of blocks
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(overlap_chunks=2, overlap_backward=True),
    dict(strategy="ulysses"),
    dict(strategy="split_gather"),
]
SWITCHES = 2 * DEPTH - 1
LEVELS = [(1, 2, 3, 4), (5, 6, -1, -1)]  # of the four blocks; 0 and 7 are those of other tests


def compare() -> None:
    mesh = SequenceMesh(dist.get_world_size())
    for levels in LEVELS:
        for options in OPTIONS:
            counter = assert_one_process_result(replace(CLIP, checkpoint=levels), mesh, **options)
            if "strategy" not in options:
                chunks = options.get("overlap_chunks", 1)
                assert counter.calls["switch", "backward"] == SWITCHES * chunks

        counter = assert_one_process_result(replace(IMAGE, checkpoint=levels), mesh)
        assert counter.calls["heads", "backward"] == 2 * DEPTH
        # As many samples as the ranks do not divide.
        masked = replace(FULL, size=(5 - mesh.sp_size, 5, 5, 7), checkpoint=levels)
        counter = assert_one_process_result(masked, mesh)
        assert counter.calls["switch", "backward"] == SWITCHES


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parity(world: int) -> None:
    run_ranks(world, compare)
