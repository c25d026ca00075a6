"""Sequence parallelism gives the one-process result in float64.

Output, input gradients and every parameter gradient are compared. All parameters are drawn at
random first, because zero initialization hides errors. Gradients are averaged over the ranks, as
ZeRO and DDP average them.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

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
)
from ranks import run_ranks

from opensora_sp.models import Point, build_model
from opensora_sp.parallel import SequenceMesh, parallelize, unwrap
from opensora_sp.parallel.cost_model import CostModel

pytestmark = pytest.mark.core
EVERYTHING = dict(mask=True, x_mask=True, drop_caption=True, drop_path=True)
SIZES_AND_PATCHES = [
    ((1, 5, 7, 9), (1, 2, 2)),
    ((2, 5, 5, 7), (2, 2, 2)),
    ((3, 3, 6, 5), (1, 2, 2)),
]
STDIT2 = [  # which pads what its patch does not divide
    Case((1, 5, 7, 9), checkpoint=True, model="STDiT2"),
    Case((2, 3, 5, 6), mask=True, model="STDiT2"),
    Case((1, 1, 4, 3), checkpoint=True, model="STDiT2"),  # an image
    replace(FULL, size=(3, 5, 6, 5), output="full", model="STDiT2"),
    replace(FULL, size=(2, 5, 5, 7), patch=(2, 2, 2), checkpoint=True, model="STDiT2"),
    replace(FULL, size=(1, 8, 5, 5), checkpoint=True, model="STDiT2"),
]
STDIT_SIZES = [(1, 5, 6, 10), (2, 3, 6, 2), (1, 1, 4, 6), (3, 5, 6, 2), (2, 6, 6, 6), (1, 8, 6, 6)]
STDIT = [
    replace(case, model="STDiT", size=size) for case, size in zip(STDIT2, STDIT_SIZES, strict=True)
]
CASES = [
    *STDIT,
    *STDIT2,
    *PLAIN,
    *(replace(case, checkpoint=True) for case in PLAIN[:4]),
    Case((1, 2, 3, 5), heads=4, checkpoint=True),  # two frames: heads are split from three ranks on
    *(
        replace(FULL, size=size, patch=patch, checkpoint=checkpoint, output=output)
        for (size, patch), checkpoint, output in product(
            SIZES_AND_PATCHES, (False, True), ("full", "shards")
        )
    ),
    replace(PLAIN[0], mask=True),
    replace(PLAIN[1], x_mask=True),
    replace(PLAIN[2], drop_path=True, output="shards"),
    replace(PLAIN[3], drop_caption=True, mask=True),
]


@dataclass(frozen=True)
class ImageCase(Case):
    """Of a model without temporal blocks."""

    def options(self) -> dict[str, Any]:
        return super().options() | dict(skip_temporal=True, use_cond=True)


IMAGES = [
    ImageCase((1, 5, 7, 9), checkpoint=True),
    ImageCase((1, 1, 4, 3)),
    ImageCase((3, 5, 6, 5), output="full", **EVERYTHING),
    ImageCase((2, 5, 5, 7), patch=(2, 2, 2), checkpoint=True, **EVERYTHING),
]
OTHER_WAYS = [dict(strategy="ulysses"), dict(strategy="split_gather")]


def compare_images_on_ranks() -> None:
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    free_links = CostModel(flops=400e12, bandwidth=1e30, latency=0)
    for case in IMAGES:
        counter = assert_one_process_result(case, mesh, cost_model=free_links)
        assert not counter.calls["switch", "forward"], counter.calls
        by_heads = case.patches[0] * case.size[0] < mesh.sp_size
        assert counter.calls["heads", "forward"] == (2 * DEPTH if by_heads else 0)

    # Nothing overlaps: there is no switch to send ahead.
    assert_one_process_result(IMAGES[0], mesh, overlap_chunks=2, overlap_backward=True)
    for options in OTHER_WAYS:
        assert_one_process_result(IMAGES[2], mesh, **options)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_without_temporal_blocks_tokens_stay_where_they_are(num_ranks: int) -> None:
    run_ranks(num_ranks, compare_images_on_ranks)


def compare_on_ranks(cases: list[Case]) -> None:
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    # At so small a width splitting heads costs less only where communication costs nothing.
    free_links = CostModel(flops=400e12, bandwidth=1e30, latency=0)
    for case in cases:
        counter = assert_one_process_result(case, mesh, cost_model=free_links)
        whole_samples = case.size[0] % mesh.sp_size == 0
        few_rows = case.size[0] * -(-case.size[1] // case.patch[0]) < mesh.sp_size
        switches = 0 if whole_samples or few_rows else 2 * DEPTH - 1
        heads = 2 * DEPTH if few_rows else 0  # q, k, v there and the output back

        for kind, calls in [("switch", switches), ("heads", heads)]:
            assert counter.calls[kind, "forward"] == counter.calls[kind, "backward"] == calls, (
                case,
                counter.calls,
            )
        assert not [key for key in counter.calls if key[1] == "recompute"], counter.calls

        if case.output == "shards":
            assert not counter.calls["gather", "forward"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_output_and_every_gradient_equal_one_process(num_ranks: int) -> None:
    run_ranks(num_ranks, compare_on_ranks, CASES)


def gradients_of_rank_losses() -> None:
    """Losses that differ by rank: the mean gradient is that of their mean, not of P times one."""
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    case = Case((1, 5, 7, 9), output="full")
    weights = [
        torch.randn(1, 4, 5, 7, 9, generator=torch.Generator().manual_seed(i)).double()
        for i in range(2)
    ]
    model = parallelize(make_model(case), mesh)
    (model(**make_inputs(case)) * weights[mesh.sp_rank]).sum().backward()
    reference = make_model(case)
    (reference(**make_inputs(case)) * (weights[0] + weights[1]) / 2).sum().backward()

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(
                parameter.grad / 2, reference.get_parameter(name).grad, rtol=1e-9, atol=1e-9
            )


def test_gather_backward_is_the_exact_adjoint() -> None:
    run_ranks(2, gradients_of_rank_losses)


def sample_then_train() -> None:
    """What a forward under inference mode leaves cached serves training, too."""
    mesh = SequenceMesh(sp_size=dist.get_world_size())
    case = Case((1, 3, 4, 10))
    model = parallelize(make_model(case), mesh)
    with torch.inference_mode():
        model(**make_inputs(case))
    model(**make_inputs(case)).square().mean().backward()
    for group, size in ((mesh.sp_group, mesh.sp_size), (mesh.dp_group, mesh.dp_size)):
        assert dist.get_world_size(group) == size  # a group of one rank is a group, not the world


def test_training_after_sampling_and_the_groups() -> None:
    run_ranks(2, sample_then_train)


def test_sp_size_1_is_bitwise_the_bare_model_and_unwrap_restores_it() -> None:
    case = replace(FULL, size=(2, 5, 7, 9))
    bare, wrapped = make_model(case), make_model(case)
    names, points = list(wrapped.state_dict()), dict(wrapped.named_modules())
    assert parallelize(wrapped, SequenceMesh(sp_size=1)) is wrapped
    assert type(wrapped) is type(bare) and list(wrapped.state_dict()) == names

    inputs = make_inputs(case)
    assert torch.equal(wrapped(**inputs), bare(**inputs))
    shard = wrapped(**inputs, output="shards")
    inside = shard.rows.inside(shard.tensor.device)  # [R, T, V]; the rest is padding
    of_patch = (inside.shape[-1], -1)
    ours, theirs = (
        z.unflatten(-1, of_patch) for z in (shard.tensor, shard.rows.slice(bare(**inputs)))
    )
    assert torch.equal(ours[inside], theirs[inside])
    assert unwrap(wrapped) is wrapped and dict(wrapped.named_modules()) == points
    assert all(point.attached is None for point in wrapped.modules() if isinstance(point, Point))
    with pytest.raises(ValueError, match="got the arguments \\['output'\\]"):
        wrapped(**inputs, output="shards")
    assert torch.equal(wrapped(**inputs), bare(**inputs))


def test_what_cannot_be_parallelized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parallelize(make_model(PLAIN[0]), SequenceMesh(1))
    with pytest.raises(ValueError, match="got a model that is parallelized already"):
        parallelize(model, SequenceMesh(1))
    with pytest.raises(ValueError, match="got output='half'; expected 'full' or 'shards'"):
        model(**make_inputs(PLAIN[0]), output="half")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="copy before parallelize"):
            copied(model)

    with pytest.raises(ValueError, match=r"call unwrap\(model.module\)"):
        unwrap(torch.nn.DataParallel(model))
    around = torch.nn.Sequential(torch.nn.Sequential(model))
    with pytest.raises(ValueError, match=r"call unwrap\(model.0.0\)"):
        unwrap(around)
    assert model(**make_inputs(PLAIN[0]), output="shards").rows.total == 20
    # This bypasses the hook that takes "output".
    assert torch.is_tensor(model.forward(**make_inputs(PLAIN[0])))

    with pytest.raises(ValueError, match=r"got a model of class Linear with sharding_points None"):
        parallelize(torch.nn.Linear(1, 1), SequenceMesh(1))

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got 2 processes without a process group"):
        SequenceMesh(2)

    with torch.device("meta"):
        skeleton = build_model("STDiT3", hidden_size=8, num_heads=2, depth=1, caption_channels=5)
    assert torch.equal(skeleton.to_empty(device="cpu").rope.freqs, torch.tensor([1.0, 0.01]))
