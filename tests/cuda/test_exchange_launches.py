"""The launches by which the cost model judges chunks and fp8 exchanges, counted under the stub.

A model of three pairs of blocks less one of two, as one rank of eight.
"""

from __future__ import annotations

from typing import Any

import pytest
from cuda_cases import batch, build, launched, step
from cuda_stub import join, requires_stub, run_on_stub

from opensora_sp.parallel.cost_model import CHUNK_LAUNCHES

pytestmark = [requires_stub, pytest.mark.slow]


def on_steps(depth: int, options: dict[str, Any]) -> None:
    from opensora_sp.parallel import SequenceMesh, parallelize

    join(world=8, rank=3)
    model = build("STDiT3", hidden_size=192, num_heads=8, depth=depth)
    parallelize(model, SequenceMesh(sp_size=8), **options)
    inputs = batch("STDiT3", model, samples=1, size=(32, 40, 32))
    step(model, inputs, "first ")
    step(model, inputs, "")


def launches_of_pair(**options: Any) -> int:
    """Kernels, products and collectives of one pair of blocks, forward and backward."""
    counts = []
    for depth in (2, 3):
        recording = run_on_stub(on_steps, depth, options)
        parts = [recording.in_phase(name) for name in ("forward", "backward")]
        counts.append(sum(launched(part) + len(part.collectives) for part in parts))
    return counts[1] - counts[0]


def test_a_further_chunk() -> None:
    one, three = launches_of_pair(overlap_chunks=1), launches_of_pair(overlap_chunks=3)
    # Two further chunks at the end of each of two blocks.
    assert (three - one) / 4 == pytest.approx(CHUNK_LAUNCHES, rel=0.2)
