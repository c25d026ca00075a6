"""Models, parallel strategies and the plugin on CUDA's code path.

The host waits for nothing, collectives get tensors of the device, and a pair of blocks is no more
launches than measured. Functions that run under the stub begin with ``on_``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from cuda_cases import CASES, batch, build, cache, on_model, step
from cuda_stub import Recording, join, phase, requires_stub, run_on_stub

from opensora_sp.models import build_model
from opensora_sp.parallel import SequenceMesh, parallelize

pytestmark = requires_stub


def sent(recording: Recording, group: str = "device") -> Counter[str]:
    """How many collectives of each kind a group carried."""
    return Counter(call.name for call in recording.collectives if call.group == group)


@pytest.mark.parametrize("case", CASES)
def test_a_model_waits_for_nothing_and_attends_by_flash_attention(case: str) -> None:
    recording = run_on_stub(on_model, case, False)
    forward, backward = recording.in_phase("forward"), recording.in_phase("backward")
    assert not recording.refused
    assert recording.streams == {0}
    assert not forward.syncs and not backward.syncs
    assert backward.memory[0].after == forward.memory[0].before

    # No kernel that keeps scores in memory takes part.
    for part, kernel in ((forward, "flash_fwd"), (backward, "flash_bwd")):
        names = " ".join(part.kernels()).lower()
        assert kernel in names and "softmax" not in names and "fmha" not in names, names


# Launches of a pair of blocks of STDiT3-XL/2 as measured, with copies and memsets. A change may
# lower them, and says why where it raises one.
LAUNCHES = {"torch": (78, 199), "triton": (30, 80)}


def on_pairs(depth: int, kernels: str) -> None:
    from opensora_sp.models.kernels import set_kernels

    set_kernels(kernels)
    model = build_model("STDiT3-XL/2", depth=depth).to("cuda", torch.bfloat16)
    x = torch.zeros(1, 4, 64, 2, 2 * 1024, device="cuda")
    y, timestep = torch.zeros(1, 1, 300, 4096, device="cuda"), torch.full((1,), 500.0).cuda()
    phase("forward")
    loss = model(x, timestep, y).square().mean()
    phase("backward")
    loss.backward()
    phase("end")


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_launches_of_a_pair_of_blocks(kernels: str) -> None:
    runs = [run_on_stub(on_pairs, depth, kernels, env=cache(), timeout=500) for depth in (1, 2)]
    for name, bound in zip(("forward", "backward"), LAUNCHES[kernels], strict=True):
        parts = [run.in_phase(name) for run in runs]
        one, two = (
            sum(map(len, (part.launches, part.gemms, part.copies, part.memsets))) for part in parts
        )
        assert 0 < two - one <= bound, (name, two - one)


CHUNKS, SWITCHES = 2, 3  # of two pairs of blocks
STRATEGIES: dict[str, dict[str, Any]] = {
    "switch": {},
    "ulysses": dict(strategy="ulysses"),
    "split_gather": dict(strategy="split_gather"),
    "chunks, overlapped backward": dict(overlap_chunks=CHUNKS, overlap_backward=True),
}


def on_strategy(options: dict[str, Any]) -> None:
    join(world=8, rank=3)
    model = build("STDiT3", checkpoint=True, hidden_size=192, num_heads=8)
    parallelize(model, SequenceMesh(sp_size=8), **options)
    # At least two frames on each rank, which can be sent in chunks.
    inputs = batch("STDiT3", model, samples=1, size=(17, 20, 8))
    for name in ("first ", ""):
        step(model, inputs, name, output="shards")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_sends_device_tensors_and_waits_for_nothing(name: str) -> None:
    recording = run_on_stub(on_strategy, STRATEGIES[name])
    assert not recording.refused

    for part in (recording.in_phase("forward"), recording.in_phase("backward")):
        calls = [call for call in part.collectives if call.group == "device"]
        assert calls and {call.name for call in calls} == {"all_to_all_single"}
        assert {call.dtypes for call in calls} == {("bfloat16",)}
        if "chunks" in name:
            assert len(calls) == SWITCHES * CHUNKS
        assert not part.syncs, part.syncs

    # The check that all ranks have the same batch.
    assert sum(sent(recording.in_phase("forward"), "host").values()) == 1
    assert not sent(recording.in_phase("backward"), "host")


def on_plugin(stage: int, overlap: bool) -> None:
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    join(world=8, rank=3)
    model = build("STDiT3", hidden_size=192, num_heads=8, checkpoint=True).float()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    plugin = SequenceParallelPlugin(
        sp_size=4, stage=stage, precision="bf16", max_norm=1.0, overlap_communication=overlap
    )
    boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    inputs = batch("STDiT3", model, samples=1)

    for name in ("first ", ""):
        phase(f"{name}forward")
        loss = boosted(**inputs, output="shards").tensor.float().square().mean()
        phase(f"{name}backward")
        optimizer.backward(loss)
        phase(f"{name}step")
        optimizer.step_if_finite(loss.detach())
        phase(f"{name}end")


@pytest.mark.parametrize(("stage", "overlap"), [(1, False), (2, True)])
def test_a_step_of_the_plugin(stage: int, overlap: bool) -> None:
    recording = run_on_stub(on_plugin, stage, overlap)
    forward, backward, update = map(recording.in_phase, ("forward", "backward", "step"))
    assert not recording.refused

    # Gradients of all ranks are summed while (or after) the switches of the backward pass are sent.
    assert sent(forward) == {"all_to_all_single": 3}
    reduction = {1: "all_reduce", 2: "reduce_scatter_tensor"}[stage]
    assert sent(backward) == {"all_to_all_single": 3, reduction: 1}
    # The gradients' norm, then the updated weights of all ranks.
    assert sent(update) == {"all_reduce": 1, "all_gather_into_tensor": 1}
    assert not sent(update, "host") and not sent(backward, "host")

    assert not forward.syncs and not backward.syncs and not update.syncs
    assert not [copy for copy in update.copies if copy.blocking]
