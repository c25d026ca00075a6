"""Every parallel strategy gives the one-process result in float64, and sends what is documented.

Elements are counted in ``u = (P-1)/P * B*T*S*C/P`` a rank; see docs/communication.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from parity_cases import (
    DEPTH,
    FULL,
    PLAIN,
    Case,
    assert_one_process_result,
    make_inputs,
    make_model,
    run_step,
)
from ranks import run_ranks

from opensora_sp.parallel import Options, SequenceMesh, parallelize
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.layout import balanced_sizes
from opensora_sp.parallel.overlap import InFlightSwitch
from opensora_sp.parallel.strategies import SplitHeads

pytestmark = pytest.mark.core
FREE_LINKS = CostModel(flops=400e12, bandwidth=1e30, latency=0)
SLOW_LINKS = CostModel(flops=400e12, bandwidth=800e3, latency=0)
CASES = [
    PLAIN[0],
    replace(PLAIN[3], checkpoint=True),  # an image
    Case((1, 2, 3, 5), heads=4, checkpoint=True),
    replace(FULL, size=(3, 5, 6, 5), output="full"),
    replace(FULL, size=(2, 5, 5, 7), patch=(2, 2, 2), checkpoint=True),
    replace(FULL, size=(3, 5, 6, 5), output="full", model="STDiT2"),
    replace(FULL, size=(1, 8, 6, 6), checkpoint=True, model="STDiT"),
]
BASELINES = [dict(strategy="ulysses"), dict(strategy="split_gather")]
OVERLAPS = [
    dict(overlap_chunks=3),
    dict(overlap_backward=True),
    dict(overlap_chunks=2, overlap_backward=True),
]


def compare_strategies() -> None:
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    for case in CASES:
        whole_samples = case.size[0] % mesh.sp_size == 0
        for options in BASELINES:
            counter = assert_one_process_result(case, mesh, **options)
            again = sum(
                calls for (_, phase), calls in counter.calls.items() if phase == "recompute"
            )
            assert bool(again) == case.checkpoint, (case, options, counter.calls)

        for options in OVERLAPS:
            counter = assert_one_process_result(case, mesh, **options)
            assert not [key for key in counter.calls if key[1] == "recompute"], counter.calls
            rows = [case.size[0] * units // mesh.sp_size for units in case.patches]
            if min(rows) and not whole_samples:
                # No chunk is empty on any rank.
                spatial, temporal = (min(options.get("overlap_chunks", 1), n) for n in rows)
                if case.model != "STDiT3":
                    # The first part of a block ends with its attention, in one piece.
                    spatial = 1
                switches = DEPTH * spatial + (DEPTH - 1) * temporal
                assert (
                    counter.calls["switch", "forward"]
                    == counter.calls["switch", "backward"]
                    == switches
                ), (
                    case,
                    options,
                )


def test_strategies_equal_one_process() -> None:
    run_ranks(2, compare_strategies)


def assert_same_order_of_gradients(case: Case, mesh: SequenceMesh, cost_model: CostModel) -> None:
    """ZeRO and DDP reduce gradients as they come: ranks without rows make them in that order."""
    model, came = parallelize(make_model(case), mesh, cost_model=cost_model), []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    model(**make_inputs(case)).sum().backward()
    orders = [None] * mesh.sp_size
    dist.all_gather_object(orders, came)
    assert all(order == came for order in orders)
    assert sorted(came) == sorted(name for name, p in model.named_parameters() if p.requires_grad)


def compare_few_rows() -> None:
    """Images and short clips on many ranks, by heads: few heads, and heads that do not divide."""
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    sizes = {4: [(1, 1, 6, 10)], 8: [(1, 5, 4, 6)]}[mesh.sp_size]
    for size in sizes:
        for heads in (2, 3, 4):
            for more in ({}, dict(recompute_communication=True)) if heads == 3 else ({},):
                case = Case(size, heads=heads, checkpoint=True)
                counter = assert_one_process_result(case, mesh, cost_model=FREE_LINKS, **more)
                assert (
                    counter.calls["heads", "forward"]
                    == counter.calls["heads", "backward"]
                    == 2 * DEPTH
                )
                assert counter.calls["heads", "recompute"] == (2 * DEPTH if more else 0)
                assert not counter.calls["switch", "forward"]
                assert_same_order_of_gradients(case, mesh, FREE_LINKS)  # also without any unit
    assert_same_order_of_gradients(Case((1, 1, 4, 4), mask=True), mesh, FREE_LINKS)

    # Where communication costs most, and most ranks have a row, whole rows switch.
    assert_same_order_of_gradients(Case((1, 1, 4, 4), mask=True), mesh, SLOW_LINKS)
    few = Case((1, mesh.sp_size - 1, 4, 6), heads=3)
    counter = assert_one_process_result(few, mesh, cost_model=SLOW_LINKS)
    assert counter.calls["switch", "forward"] == 2 * DEPTH - 1
    assert not counter.calls["heads", "forward"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_fewer_frames_than_ranks(num_ranks: int) -> None:
    run_ranks(num_ranks, compare_few_rows)


def test_heads_are_split_where_that_is_cheaper() -> None:
    def applies(*shape: int) -> bool:
        return SplitHeads.applies(BatchShape(*shape), Options(), ranks=4)

    assert applies(1, 1, 1024, 1152, 16)  # an image of STDiT3-XL/2
    assert not applies(1, 3, 64, 16, 4)  # so narrow that communication costs more than the work
    assert not applies(1, 4, 1024, 1152, 16)  # a frame for every rank
    assert not applies(4, 1, 1024, 1152, 16)  # a sample for every rank
    # Two heads of one frame leave two ranks without attention.
    assert balanced_sizes(1 * 1 * 2, 4).count(0) == 2


def backward_overlap_is_bitwise() -> None:
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    case = replace(PLAIN[0], checkpoint=True)
    _, plain, plain_counter = run_step(case, mesh)
    _, overlapped, counter = run_step(case, mesh, overlap_backward=True)
    assert counter.elements == plain_counter.elements
    for name, gradient in plain.items():
        assert torch.equal(overlapped[name], gradient), name


def recompute_runs_while_gradients_are_in_flight() -> None:
    """Between sending a gradient off and waiting for it, the block before is computed again."""
    events: list[str] = []
    for name in ("send_gradient", "receive_gradient"):
        original = getattr(InFlightSwitch, name)
        setattr(
            InFlightSwitch,
            name,
            lambda *args, _f=original, _n=name: (events.append(_n), _f(*args))[1],
        )

    case = replace(PLAIN[0], checkpoint=True)
    for overlap_backward in (True, False):
        model = make_model(case)
        block = model.spatial_blocks[0]
        block.register_forward_pre_hook(lambda *_: events.append("block"))
        mesh = SequenceMesh(sp_size=dist.get_world_size())
        parallelize(
            model,
            mesh,
            overlap_backward=overlap_backward,
            overlap_chunks=2,
        )
        out = model(**make_inputs(case)).sum()
        events.clear()
        out.backward()
        last = len(events) - 1 - events[::-1].index("send_gradient")
        assert events[last:] == [
            "send_gradient",
            "block",
            "receive_gradient",
            "receive_gradient",
        ], events


def in_turn(*functions) -> None:
    for function in functions:
        function()


def test_backward_overlap() -> None:
    run_ranks(2, in_turn, backward_overlap_is_bitwise, recompute_runs_while_gradients_are_in_flight)
