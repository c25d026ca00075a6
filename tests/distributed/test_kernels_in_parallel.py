"""Sequence parallelism with Triton's kernels, interpreted, in float64."""

from __future__ import annotations

from unittest import mock

import parity_cases
import pytest
import torch
import torch.distributed as dist
from interpreter import run_interpreted
from parity_cases import Case, assert_one_process_result
from ranks import run_ranks

from opensora_sp.models import compile_blocks
from opensora_sp.models.kernels import set_kernels
from opensora_sp.parallel import SequenceMesh, parallelize

# Rows that do not divide, with conditioning frames; some samples are whole on a rank.
WAYS = [
    (Case((1, 3, 5, 6), x_mask=True), {}, False),
    (Case((1, 3, 5, 6), x_mask=True), dict(strategy="ulysses"), True),
]


def with_kernels() -> None:
    # Triton is imported where it runs.
    from opensora_sp.models.kernels.triton import modulation

    set_kernels("triton")
    mesh = SequenceMesh(sp_size=dist.get_world_size())

    def parallelize_compiled(
        model: torch.nn.Module, mesh: SequenceMesh, **options
    ) -> torch.nn.Module:
        return compile_blocks(parallelize(model, mesh, **options), backend="aot_eager")

    for case, options, compiled in WAYS:
        # What assert_one_process_result calls.
        parity_cases.parallelize = parallelize_compiled if compiled else parallelize
        with mock.patch.object(modulation, "add_gated", wraps=modulation.add_gated) as kernel:
            counter = assert_one_process_result(case, mesh, **options)
        assert kernel.called
        assert counter.calls["heads" if options else "switch", "backward"]


def on_ranks() -> None:
    run_ranks(2, with_kernels, timeout=900)


@pytest.mark.slow
def test_parity_with_kernels() -> None:
    run_interpreted(on_ranks)
