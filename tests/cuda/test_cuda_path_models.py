"""Every model, forward and backward, on CUDA's code path: kernels launched, and host syncs.

The bounds are what was measured. A change may lower them, and says why where it raises one.
"""

import pytest
from cuda_cases import CASES, launched, on_model
from cuda_stub import requires_stub, run_on_stub

pytestmark = requires_stub

# Kernels and products that a forward and a backward pass launch at depth 2.
LAUNCHES = {
    "STDiT": (107, 287),
    "STDiT2": (284, 417),
    "STDiT2 x_mask": (299, 497),
    "STDiT3": (272, 492),
    "STDiT3 x_mask": (288, 585),
    "STDiT3 text mask": (272, 524),
    "STDiT3 windows": (323, 515),
    "STDiT3 full attention": (276, 492),
    "STDiT video_mask": (139, 316),
    "STDiT3 video_mask": (321, 609),
    "STDiT3 windows, all masks": (390, 757),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case):
    recording = run_on_stub(on_model, case, False)
    forward, backward = recording.in_phase("forward"), recording.in_phase("backward")
    if case in LAUNCHES:
        found, bounds = (launched(forward), launched(backward)), LAUNCHES[case]
        assert found[0] <= bounds[0] and found[1] <= bounds[1], f"launched {found}"

    assert not recording.refused
    assert recording.streams == {0}
    assert not forward.syncs and not backward.syncs
    assert backward.memory[0].after == forward.memory[0].before


@pytest.mark.parametrize("case", LAUNCHES)
def test_attention_is_flash_attention(case):
    """No kernel that keeps scores in memory takes part."""
    recording = run_on_stub(on_model, case, False)
    forward, backward = recording.in_phase("forward"), recording.in_phase("backward")
    for part, kernel in ((forward, "flash_fwd"), (backward, "flash_bwd")):
        kernels = part.kernels()
        names = " ".join(kernels).lower()
        assert kernel in names and "softmax" not in names and "fmha" not in names, kernels


def test_recompute_launches_the_forward_of_blocks_again():
    plain, recomputed = (
        run_on_stub(on_model, "STDiT3", checkpoint) for checkpoint in (False, True)
    )
    assert launched(recomputed.in_phase("forward")) == launched(plain.in_phase("forward"))
    again = launched(recomputed.in_phase("backward")) - launched(plain.in_phase("backward"))
    assert 0 < again < launched(plain.in_phase("forward"))

    # Four blocks of whose activations checkpointing keeps one each.
    assert recomputed.peak("forward").allocated < plain.peak("forward").allocated
    assert not recomputed.in_phase("backward").syncs
