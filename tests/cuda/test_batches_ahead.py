"""Batches on a GPU: copied from pinned memory beside the computation, not read or reused too early.

The order of accesses decides, not the speed (``stream_checker``). Functions that run under the stub
begin with ``on_``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cuda_stub import phase, requires_stub, run_on_stub
from stream_checker import StreamChecker

from opensora_sp.common.tensors import copied_ahead, map_tensors
from opensora_sp.data.dataset import Clip, ClipShape, Sample
from opensora_sp.data.loader import StepLoader
from opensora_sp.data.sampler import MicroBatchPlan, ReadRequest, ReplicaBatches
from opensora_sp.features.batch import DrawConfig

pytestmark = requires_stub

CUDA = torch.device("cuda", 0)
SHAPE, LATENT_SIZE = ClipShape(4, 64, 64), (4, 16, 16)
VIDEO, NOISE = 3 * 4 * 64 * 64, 4 * 3 * 4 * 16 * 16  # bytes of a clip
STEPS = 3


class Clips:
    """Clips without content."""

    def __getitem__(self, sample: Sample) -> Clip:
        return Clip(torch.zeros(3, *sample.shape, dtype=torch.uint8), "a caption", 8.0)


def loader_of(num_workers: int) -> StepLoader:
    """Three steps of one micro-batch of two clips."""
    plan = MicroBatchPlan(
        num_samples=9, batch_size=2, micro_batches_per_step=1, seed=5, shape=SHAPE
    )
    batches = ReplicaBatches(
        plan,
        start=0,
        stop=STEPS,
        replica=0,
        num_replicas=1,
        request_of=lambda one, group: ReadRequest(one, one.samples, LATENT_SIZE),
    )
    rules = DrawConfig(seed=0, channels=3)
    return StepLoader(
        Clips(),
        batches,
        num_workers=num_workers,
        seed=0,
        draw=rules.draw_micro_batch,
        device=CUDA,
    )


def on_steps(num_workers: int) -> tuple[bool, ...]:
    torch.cuda.init()
    on_device = []
    for number, step in enumerate(loader_of(num_workers)):
        phase(f"step {number}")
        for loaded in step.loaded:
            phase(f"compute {number}")
            tensors: list[torch.Tensor] = []
            map_tensors(lambda t, found=tensors: found.append(t) or t, loaded)
            on_device.append(len(tensors) == 5 and all(t.is_cuda for t in tensors))
            for tensor in tensors:
                tensor.float().square()
    phase("end")
    return tuple(on_device)


@pytest.mark.slow
def test_batches_are_copied_one_ahead_from_pinned_memory() -> None:
    recording = run_on_stub(on_steps, 1)
    assert recording.result == (True,) * STEPS

    copies = [copy for copy in recording.copies if copy.kind == "H2D"]
    # Two videos, noise, timesteps and ids.
    assert len(copies) == 5 * STEPS
    assert all(copy.asynchronous and copy.pinned and copy.stream != 0 for copy in copies)
    assert sum(copy.bytes for copy in copies) >= STEPS * 2 * (VIDEO + NOISE)
    assert not recording.syncs

    # The second batch is on its way before the first one is computed, and the last one is the last.
    ahead = [len(recording.in_phase(f"step {number}").copies) for number in range(STEPS)]
    assert ahead == [10, 5, 0]
    computed = [recording.in_phase(f"compute {number}") for number in range(STEPS)]
    assert all(launch.stream == 0 for part in computed for launch in part.launches)


def values(count: int) -> Iterator[list[torch.Tensor]]:
    """Batches of sizes that let the allocator reuse a block of another batch."""
    for number in range(count):
        yield [torch.zeros(1000 * (1 + number % 2)), torch.zeros(7)]


def on_streams(fault: str | None) -> list[str]:
    torch.cuda.init()
    owner = torch.Tensor if fault == "record_stream" else torch.cuda.Stream
    checker = StreamChecker()
    without = patch.object(owner, fault, lambda *args: None) if fault else nullcontext()
    with checker, without:
        for value in copied_ahead(values(8), CUDA):
            torch.stack([tensor.sum() for tensor in value])
            # Its memory is free as soon as the last kernel is launched.
            del value
    # A checker that sees nothing would find nothing.
    assert len(checker.operators) == 2 and sum(checker.operators.values()) >= 8 * 4
    return sorted(set(checker.races))


def test_no_batch_is_read_or_reused_before_its_stream_has_finished() -> None:
    assert run_on_stub(on_streams, None).result == []


@pytest.mark.parametrize(
    ("fault", "race"),
    [("wait_event", "does not wait for _to_copy"), ("record_stream", "may reuse freed memory")],
)
def test_an_order_that_is_left_out_is_found(fault: str, race: str) -> None:
    races: list[Any] = run_on_stub(on_streams, fault).result
    assert any(re.search(race, found) for found in races)
