"""Predicted step times: what operators compute and move, and how that adds up."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from opensora_sp.cli.plan import table
from opensora_sp.config import load_train_config
from opensora_sp.models.recompute import EVERYTHING, OFFLOADED
from opensora_sp.models.registry import resolve_config
from opensora_sp.parallel import Options
from opensora_sp.parallel.cost_model import GPUS
from opensora_sp.planner import plan, run_estimator
from opensora_sp.planner.flops import ModelFlops
from opensora_sp.planner.operators import (
    CROSS,
    ELEMENTWISE,
    PRODUCTS,
    SPATIAL,
    TEMPORAL,
    OperatorCounter,
    Work,
)
from opensora_sp.planner.run_estimator import RunEstimator
from opensora_sp.planner.step_time import EXCHANGES, ZERO, StepTime, predict_step
from opensora_sp.planner.trace import meta_model

H200 = GPUS["H200"]
BF16 = torch.bfloat16
XL2 = dataclasses.replace(resolve_config("STDiT3-XL/2"), depth=4)
ATTENTIONS = (SPATIAL, TEMPORAL, CROSS)


def predict(*latents: int, depth: int = 4, **options: object) -> StepTime:
    config = dataclasses.replace(XL2, depth=depth)
    defaults = dict(gpu=H200, options=Options(), ranks=1, world=1, dtype=BF16, levels=[EVERYTHING])
    return predict_step("STDiT3", config, latents, **{**defaults, **options})  # type: ignore[arg-type]


def counted(function, *shapes):
    tensors = [torch.empty(shape, dtype=BF16, device="meta") for shape in shapes]
    with OperatorCounter(H200) as counter:
        function(*tensors)
    return counter.work


def test_bytes_of_elementwise_operators():
    work = counted(lambda a, b: a * b, (8, 16), (8, 16))[ELEMENTWISE]
    assert (work.bytes, work.operators) == (3 * 8 * 16 * 2, 1)

    # Each tensor is read once; an expanded one has the bytes of its numbers.
    assert counted(lambda a: a * a, (8, 16))[ELEMENTWISE].bytes == 2 * 8 * 16 * 2
    expanded = counted(lambda a, b: a + b.expand(8, 16), (8, 16), (1, 16))[ELEMENTWISE]
    assert expanded.bytes == (2 * 8 * 16 + 16) * 2


def test_views_and_allocations_cost_nothing():
    assert not counted(lambda a: (a.view(4, 32).transpose(0, 1), torch.empty_like(a)), (8, 16))
    # A product of three dims is reshaped by a view that the operator's schema does not declare.
    assert not counted(lambda a: torch.ops.aten._unsafe_view(a, [4, 32]), (8, 16))


def test_gathers_and_copies():
    index = torch.zeros(3, dtype=torch.long, device="meta")
    work = counted(lambda a: a.index_select(0, index), (100, 16))[ELEMENTWISE]
    assert work.bytes == 2 * 3 * 16 * 2 + 3 * 8

    # A copy reads its source and writes its target.
    assert counted(lambda a, b: a.copy_(b), (8, 16), (8, 16))[ELEMENTWISE].bytes == 2 * 8 * 16 * 2


def test_flops_of_matrix_products():
    linear = counted(F.linear, (10, 32), (64, 32), (64,))[PRODUCTS]
    assert linear.flops == 2 * 10 * 32 * 64
    assert counted(torch.bmm, (4, 10, 32), (4, 32, 8))[PRODUCTS].flops == 2 * 4 * 10 * 32 * 8


@pytest.mark.parametrize("checkpointing", [False, True])
def test_flops_are_those_of_the_model(checkpointing):
    """Matrix products and scores, with recomputation of all but the attention's own backward."""
    latents = (2, 4, 8, 32, 32)
    work = predict(*latents, levels=[0 if checkpointing else EVERYTHING]).work
    model = meta_model("STDiT3", XL2, BF16)
    expected = ModelFlops.of(model).forward(latents, 2.0 * XL2.model_max_length)

    passes = 4 if checkpointing else 3
    attention = sum(work[kind].flops for kind in ATTENTIONS)
    # FlashAttention computes 3.5 times its forward, and once more if it is recomputed.
    scores = attention / (passes + 0.5)
    products = work[PRODUCTS].flops / passes
    # Embedders and text projections are not recomputed; the model counts neither of the first.
    assert (products + scores) / expected == pytest.approx(1, abs=0.02)


def test_attentions_are_distinguished():
    work = predict(1, 4, 6, 64, 64).work
    frames, patches, width = 6, 32 * 32, 1152
    calls = 3.5 * 4 * width * 4  # forward and backward of a score, 4 blocks
    assert work[SPATIAL].flops == calls * frames * patches**2
    assert work[TEMPORAL].flops == calls * patches * frames**2
    assert work[CROSS].flops == pytest.approx(2 * calls * frames * patches * 300, rel=1e-6)


def pair_of(kernels: str, level: int = EVERYTHING) -> dict[str, Work]:
    """The work of a pair of blocks on a clip of 16 x 1,024 tokens."""
    shallow, deep = (
        predict(1, 4, 16, 64, 64, depth=depth, levels=[level], kernels=kernels).work
        for depth in (2, 3)
    )
    return {kind: one.plus(shallow[kind], -1) for kind, one in deep.items()}


def test_kernels_move_what_their_arguments_point_to():
    """As ``tests/cuda/test_block_costs.py`` counts it under the stub: per block, in activations
    24.0 forward and 37.6 backward, where plain torch moves 46.6 and 138.9."""
    activation = 16 * 1024 * 1152 * 2
    plain, fused = pair_of("torch"), pair_of("triton")
    assert fused[ELEMENTWISE].bytes / 2 / activation == pytest.approx(24.0 + 37.6, rel=0.01)
    assert plain[ELEMENTWISE].bytes / 2 / activation > 46.6 + 138.9

    # FlashAttention's backward is one operator, of three kernels.
    assert sum(one.operators for one in fused.values()) == pytest.approx(30 + 80, rel=0.15)
    assert sum(one.operators for one in plain.values()) > 2 * (30 + 80)
    # Python launches Triton's, which takes the host longer.
    launches, of_plain = (sum(one.launches for one in pair.values()) for pair in (fused, plain))
    assert of_plain < launches < 2 * of_plain


@pytest.mark.parametrize("level", [EVERYTHING, 0])
def test_kernels_compute_what_plain_torch_computes(level):
    plain, fused = pair_of("torch", level), pair_of("triton", level)
    for kind in (PRODUCTS, *ATTENTIONS):
        assert fused[kind].flops == plain[kind].flops, kind
    for kind in (PRODUCTS, SPATIAL, CROSS):
        assert fused[kind].seconds == pytest.approx(plain[kind].seconds, rel=1e-3), kind

    # Rows of 16 frames: FlashAttention-2 pads them to 128, and the kernel moves each tensor once.
    moved = fused[TEMPORAL].bytes / H200.memory_bandwidth
    assert fused[TEMPORAL].seconds == pytest.approx(moved)
    assert fused[TEMPORAL].seconds < plain[TEMPORAL].seconds / 2


CONFIG = Path(__file__).parents[2] / "configs/stdit3/train/64x512x512_sp8.py"


def test_a_plan_is_of_the_kernels_of_a_run(monkeypatch):
    """All verified; or plain torch, where the config asks for it or Triton is not installed."""
    options = ["sp_size=1", "model.depth=2", "grad_checkpoint=False", "num_frames=16"]
    made = []
    for setting in ("auto", "torch"):
        cfg = load_train_config(CONFIG, [*options, f"kernels={setting}"])
        made.append(plan(cfg, 1, gpu="H200"))
    fused, plain = (one.buckets[0] for one in made)
    assert fused.time.seconds < plain.time.seconds
    assert fused.memory.plain.activations < plain.memory.plain.activations

    for one, kernels in zip(made, ("with Triton kernels", "in plain torch"), strict=True):
        assert f"(predicted, {kernels})" in table(one) and one.to_dict()["kernels"] == kernels
        is_listed = "temporal attention: the Triton kernel for short rows" in table(one)
        assert is_listed == (kernels == "with Triton kernels")

    monkeypatch.setattr(run_estimator.importlib.util, "find_spec", lambda name: None)
    run = RunEstimator(load_train_config(CONFIG), 8, None, "cuda", None)
    assert run.plan_kernels() == "in plain torch, since Triton is not installed here"
    assert run.kernels == "torch"


def test_further_pairs_add_alike():
    deep, shallow = (
        predict(1, 4, 4, 16, 16, depth=depth, ranks=2, world=2, levels=[0]) for depth in (6, 4)
    )
    pair = deep.work[PRODUCTS].plus(shallow.work[PRODUCTS], -1)
    assert pair.flops > 0
    assert pair.operators == pytest.approx(2 * 2 * 30, rel=0.2)


def test_ranks_share_the_work_and_pay_for_the_links():
    one, eight = predict(1, 4, 16, 32, 32), predict(1, 4, 16, 32, 32, ranks=8, world=8)
    # Each rank projects the whole text.
    assert eight.work[PRODUCTS].flops == pytest.approx(one.work[PRODUCTS].flops / 8, rel=0.1)
    for kind in ATTENTIONS:
        assert eight.work[kind].flops == pytest.approx(one.work[kind].flops / 8, rel=1e-6)
    assert EXCHANGES not in one.work or not one.work[EXCHANGES].seconds
    assert eight.work[EXCHANGES].operators == 2 * (2 * 4 - 1)
    assert one.seconds / 8 < eight.seconds < one.seconds
    assert eight.mfu < one.mfu


def test_small_batches_are_bound_by_launches():
    assert predict(1, 4, 1, 8, 8).is_launch_bound
    large = predict(1, 4, 64, 64, 64)
    assert not large.is_launch_bound
    assert large.seconds == pytest.approx(sum(one.seconds for one in large.work.values()))


def test_single_precision_is_refused():
    with pytest.raises(ValueError, match="for which the speeds of GPUs are known; set precision"):
        predict(1, 4, 1, 8, 8, dtype=torch.float32)


@pytest.mark.slow
def test_configs_state_todays_predictions():
    """Memory, step time and MFU in the docstrings of the shipped configs."""
    script = Path(__file__).parents[2] / "scripts" / "config_headers.py"
    subprocess.run([sys.executable, script, "--check"], check=True)


@pytest.mark.slow
def test_copies_to_the_host_run_beside_the_computation():
    latents = (1, 4, 8, 64, 64)
    kept, hosted = predict(*latents, levels=[0]), predict(*latents, levels=[OFFLOADED])
    copies = hosted.host_copies
    assert kept.host_copies.bytes == 0
    # Eight blocks, out and back.
    assert copies.bytes == 2 * 8 * (8 * 32 * 32 * 1152 * 2)
    assert copies.seconds == copies.bytes / H200.to_host
    assert hosted.work == kept.work and hosted.seconds == kept.seconds

    half = predict(*latents, levels=[0, OFFLOADED], micro_batches=3)
    assert half.host_copies.bytes == 3 * copies.bytes / 2

    # What takes longer than forward, a quarter of the step, is waited for.
    slow = predict(*latents, levels=[OFFLOADED], gpu=dataclasses.replace(H200, to_host=1e9))
    assert slow.seconds == pytest.approx(0.75 * kept.seconds + slow.host_copies.seconds / 2)


def test_gradients_are_reduced_in_each_micro_batch_or_once_in_fp32():
    how = dict(world=4, ranks=1, micro_batches=3)
    reduced = predict(1, 4, 2, 8, 8, **how).work[ZERO].bytes
    once = predict(1, 4, 2, 8, 8, **how, accumulates_locally=True).work[ZERO].bytes
    trained = sum(
        p.numel() for p in meta_model("STDiT3", XL2, BF16).parameters() if p.requires_grad
    )

    # And weights are gathered in bf16; a rank sends to three others.
    assert reduced == (3 * 2 + 2) * trained * 3 / 4
    assert once == (4 + 2) * trained * 3 / 4
