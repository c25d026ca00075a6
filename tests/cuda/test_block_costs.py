"""Launches and memory traffic of a pair of blocks of STDiT3-XL/2.

The bounds are what was measured. A change may lower them, and says why where it raises one.
Launches include matrix products, copies and memsets. Traffic is in activations per token: C numbers
in bf16.
"""

import pytest
import torch
from block_costs import OperatorBytes, pair_costs
from cuda_stub import join, requires_stub, run_on_stub

pytestmark = requires_stub

# Launches of a pair; traffic per block of all but matrix products and attention.
BOUNDS = {"forward": (78, 46.6), "backward": (199, 138.9)}
BOUNDS_WITH_KERNELS = {"forward": (30, 24.1), "backward": (80, 37.7)}
SWITCH = 8  # of a pair: two switches, each of which packs and places its tokens once


@pytest.mark.parametrize(
    ("kernels", "bounds"),
    [
        ("torch", BOUNDS),
        pytest.param("triton", BOUNDS_WITH_KERNELS, marks=pytest.mark.slow),
    ],
)
def test_a_pair_of_blocks_on_one_clip(kernels: str, bounds: dict[str, tuple[int, float]]) -> None:
    options = dict(frames=64, patches=1024, kernels=kernels)
    for name, costs in pair_costs(**options).items():
        launches, traffic = bounds[name]
        assert costs.launches <= launches
        assert costs.activations["elementwise"] / 2 <= traffic
        assert "switch" not in costs.activations  # no table is gathered, no token sent


@pytest.mark.slow
def test_without_gradients_gelu_is_part_of_the_product() -> None:
    """Of a block it reads and writes 8 activations in training, by a kernel of its own."""
    launches, traffic = BOUNDS_WITH_KERNELS["forward"]
    options = dict(frames=64, patches=1024, kernels="triton")
    forward = pair_costs(**options, training=False)["forward"]
    assert forward.launches <= launches - 2
    assert forward.activations["elementwise"] / 2 <= traffic - 8


@pytest.mark.slow
def test_images_take_neither_queries_nor_keys_over_frames() -> None:
    """Of the matrix products 4 of 56 parts, and in the temporal block no attention to itself."""
    clip, image = pair_costs(frames=2, patches=512), pair_costs(frames=1, patches=1024)
    for name in BOUNDS:
        assert image[name].launches < clip[name].launches
        for kind in ("elementwise", "matrix products", "attention"):
            assert image[name].activations[kind] < clip[name].activations[kind] - 3, kind


def on_switch() -> dict:
    """What one of 8 ranks does with the tokens of one clip, in either direction."""
    from opensora_sp.parallel import SequenceMesh
    from opensora_sp.parallel.collectives import _exchange_now
    from opensora_sp.parallel.layout import SPATIAL_ROWS, TEMPORAL_ROWS, BatchAxes, plan_exchange

    join(world=8, rank=3)
    device, axes = torch.device("cuda"), BatchAxes(1, 64, 1024)
    plan = plan_exchange(axes, SPATIAL_ROWS, TEMPORAL_ROWS, 8, 3, device)
    tokens = torch.zeros(64 * 1024 // 8, 1152, device=device, dtype=torch.bfloat16)
    group = SequenceMesh(sp_size=8).sp_group.group_name
    with OperatorBytes() as counter:
        counter.begin("forward")
        splits = plan.send_splits, plan.recv_splits
        _exchange_now(tokens, plan.pack, plan.place, *splits, group, "switch", False)
        counter.begin("end")
    return {kind: count / tokens.nbytes for kind, count in counter.bytes["forward"].items()}


def test_a_switch_moves_each_token_twice() -> None:
    found = run_on_stub(on_switch).result
    assert 0 < 2 * found["switch"] <= SWITCH, found
