"""Selective gradient checkpointing with sequence parallelism, in float64 against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from parity_cases import FULL, PLAIN, Case, assert_one_process_result
from ranks import run_ranks

from opensora_sp.parallel import SequenceMesh

pytestmark = pytest.mark.core
IMAGE = Case((1, 1, 4, 3))  # heads are exchanged inside of blocks
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(overlap_chunks=2, overlap_backward=True),
    dict(placement="branch"),
    dict(placement="branch", recompute_communication=True),
    dict(strategy="ulysses"),
    dict(strategy="split_gather"),
]
LEVELS = [(1, 2, 3, 4), (5, 6, 0, 7)]  # of the four blocks


def compare() -> None:
    mesh = SequenceMesh(dist.get_world_size())
    for levels in LEVELS:
        for options in OPTIONS:
            assert_one_process_result(replace(PLAIN[0], checkpoint=levels), mesh, **options)
        assert_one_process_result(replace(IMAGE, checkpoint=levels), mesh)
        masked = replace(FULL, size=(2, 5, 5, 7), checkpoint=levels)
        assert_one_process_result(masked, mesh)


@pytest.mark.parametrize("world", [2, 3])
def test_parity(world: int) -> None:
    run_ranks(world, compare)
