"""STDiT and STDiT2 with sequence parallelism: the one-process result in float64, elements sent.

A block of these models has two parts with a switch between, so N blocks make 2N - 1 switches.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from family_parity import (
    BLOCKS,
    FamilyCase,
    Parity,
)
from parity_cases import make_inputs, make_model
from ranks import run_ranks

from opensora_sp.models import hook_points, recompute
from opensora_sp.parallel import SequenceMesh, parallelize
from opensora_sp.parallel.strategies import SplitHeads

pytestmark = pytest.mark.core
FULL = FamilyCase((1, 1, 1, 1), mask=True, x_mask=True, drop_caption=True, drop_path=True)
STDIT2 = [  # which pads what its patch does not divide
    FamilyCase((1, 5, 7, 9), checkpoint=True),
    FamilyCase((2, 3, 5, 6), mask=True),
    FamilyCase((1, 1, 4, 3), checkpoint=True),  # an image
    replace(FULL, size=(3, 5, 6, 5), output="full"),
    replace(FULL, size=(2, 5, 5, 7), patch=(2, 2, 2), checkpoint=True),
    replace(FULL, size=(1, 8, 5, 5), checkpoint=True),
]
STDIT = [
    replace(case, model="STDiT", size=size)
    for case, size in zip(
        STDIT2,
        [(1, 5, 6, 10), (2, 3, 6, 2), (1, 1, 4, 6), (3, 5, 6, 2), (2, 6, 6, 6), (1, 8, 6, 6)],
        strict=True,
    )
]
CASES = [*STDIT, *STDIT2]
IMAGES = [STDIT[2], STDIT2[2]]
VARIED = [STDIT[3], STDIT[5], STDIT2[3], STDIT2[5]]  # shared in other ways, too
OTHER_WAYS = [dict(strategy="ulysses"), dict(strategy="split_gather")]


def compare_on_ranks() -> tuple[float, int]:
    parity = Parity(SequenceMesh(sp_size=dist.get_world_size()))
    for case in CASES:
        parity.check_switch(case)
    for case in VARIED:
        for options in OTHER_WAYS:
            parity.check(case, **options)
        parity.check_overlap(case)
        wrapped = parallelize(make_model(case), parity.mesh)
        assert all(
            point.attached for point in wrapped.modules() if isinstance(point, hook_points.Point)
        )

    # Whole rows also where most ranks then hold no spatial row.
    SplitHeads.applies = classmethod(lambda *_: False)
    for case in IMAGES:
        parity.check_switch(case)
    return parity.worst, parity.comparisons


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_output_and_every_gradient_equal_one_process(num_ranks: int) -> None:
    for worst, comparisons in run_ranks(num_ranks, compare_on_ranks):
        assert worst <= 1e-9 and comparisons > 1000


@pytest.mark.parametrize("model", ["STDiT", "STDiT2"])
def test_a_checkpointed_block_is_two_recomputed_segments(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(STDIT[0], model=model)
    segments: list[int] = []  # of each checkpointed function, how often it ran
    original = recompute.checkpoint

    def counted(function, *args, **options):
        index = len(segments)
        segments.append(0)

        def run(*args):
            segments[index] += 1
            return function(*args)

        return original(run, *args, **options)

    monkeypatch.setattr(recompute, "checkpoint", counted)
    runs = {"attn": 0, "attn_temp": 0, "mlp": 0}
    bare = make_model(case)
    for block in bare.blocks:
        for name in runs:
            block.get_submodule(name).register_forward_pre_hook(
                lambda *_, _n=name: runs.__setitem__(_n, runs[_n] + 1)
            )
    output = bare(**make_inputs(case))
    assert segments == [1] * (2 * BLOCKS) and set(runs.values()) == {BLOCKS}
    output.sum().backward()
    assert segments == [2] * (2 * BLOCKS) and set(runs.values()) == {2 * BLOCKS}
    segments.clear()
    with torch.no_grad():
        assert torch.equal(bare(**make_inputs(case)), output) and not segments
    bare.set_grad_checkpoint(False)
    bare(**make_inputs(case)).sum().backward()
    assert not segments


@pytest.mark.parametrize("case", [STDIT[3], STDIT2[3]], ids=["STDiT", "STDiT2"])
def test_sp_size_1_is_bitwise_the_bare_model(case: FamilyCase) -> None:
    bare, wrapped = make_model(case), parallelize(make_model(case), SequenceMesh(sp_size=1))
    assert torch.equal(wrapped(**make_inputs(case)), bare(**make_inputs(case)))
