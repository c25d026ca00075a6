"""Sequence parallelism with Triton's kernels, interpreted, in float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist
from interpreter import run_interpreted
from parity_cases import Case, assert_one_process_result
from ranks import run_ranks

from opensora_sp.models.kernels import set_kernels
from opensora_sp.parallel import SequenceMesh

# Rows that do not divide, with conditioning frames; some samples are whole on a rank.
CASE = Case((1, 3, 5, 6), x_mask=True)


def with_kernels() -> None:
    # Triton is imported where it runs.
    from opensora_sp.models.kernels.triton import modulation

    set_kernels("triton")
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    with mock.patch.object(modulation, "add_gated", wraps=modulation.add_gated) as kernel:
        counter = assert_one_process_result(CASE, mesh)
    assert kernel.called
    assert counter.calls["switch", "backward"]


def on_ranks() -> None:
    run_ranks(2, with_kernels, timeout=900)


@pytest.mark.slow
def test_parity_with_kernels() -> None:
    run_interpreted(on_ranks)
