"""Inputs of blocks that leave the device: what is copied and when, the order of streams, memory.

The order of accesses decides, not the speed (``stream_checker``). Functions that run under the stub
begin with ``on_``.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from cuda_cases import batch, build, step
from cuda_stub import requires_stub, run_on_stub
from stream_checker import StreamChecker

from opensora_sp.models.recompute import OFFLOADED

pytestmark = requires_stub

CASE, BLOCKS = "STDiT3 x_mask", 4
TOKENS = 2 * 8 * 8 * 8
INPUT = TOKENS * 144 * 2  # bytes


def on_steps() -> None:
    """Two steps."""
    model = build(CASE, checkpoint="offload")
    inputs = batch(CASE, model)
    step(model, inputs, "first ")
    step(model, inputs, "")

    levels = [block.checkpoint_level for block in model.transformer_blocks]
    assert levels == [OFFLOADED] * BLOCKS


def test_each_input_is_copied_and_the_host_waits_for_none() -> None:
    recording = run_on_stub(on_steps)
    forward, backward = recording.in_phase("forward"), recording.in_phase("backward")
    out = [copy for copy in forward.copies if copy.kind == "D2H"]
    back = [copy for copy in backward.copies if copy.kind == "H2D"]

    # The last input is still on the device when backward begins.
    assert len(out) == BLOCKS and len(back) == BLOCKS - 1
    assert sum(copy.bytes for copy in out) == BLOCKS * INPUT
    assert sum(copy.bytes for copy in back) == (BLOCKS - 1) * INPUT

    # Beside the computation, all on one stream: so buffers are reused in its order.
    (stream,) = {copy.stream for copy in (*out, *back)}
    assert all(copy.asynchronous and copy.pinned for copy in (*out, *back))
    for part in (forward, backward):
        computing = {record.stream for record in (*part.launches, *part.gemms)}
        assert computing == {0} and stream != 0
        assert not part.syncs
        assert not [one for one in part.allocations if one.kind == "pinned"], "buffers are reused"


# --- the order of streams


def on_streams() -> list[str]:
    """The races of steps, of a backward that ends early and of a pass without one."""
    model = build(CASE, checkpoint="offload")
    inputs = batch(CASE, model)
    checker = StreamChecker()
    with checker:
        for _ in range(2):
            step(model, inputs, "")
        ends_early(model, inputs)
        model(**inputs)
        step(model, inputs, "")
    # A checker that sees nothing would find nothing.
    assert len(checker.operators) == 2
    assert min(checker.operators.values()) >= 5 * BLOCKS
    return sorted(set(checker.races))


def ends_early(model: Any, inputs: Any) -> None:
    """Backward of the last block alone. The input of the one before is on its way meanwhile."""
    out = model(**inputs)
    out.square().mean().backward(inputs=[model.temporal_blocks[-1].mlp.fc1.weight])
    del out
    gc.collect()
    model.zero_grad(set_to_none=True)


@pytest.mark.slow
def test_no_input_is_read_or_its_memory_reused_before_its_copy_is_complete() -> None:
    assert run_on_stub(on_streams).result == []
