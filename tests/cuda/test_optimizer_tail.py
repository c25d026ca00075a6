"""What the end of a training step launches: norm, clipping, AdamW, EMA, and the new weights.

Also the launches that compare the weights of ranks, every so many steps.

The parameters are those of STDiT3-XL/2, 971 tensors. ColossalAI's step launches 7,901 kernels and
974 copies for them on one rank of eight, and waits three times.
"""

from __future__ import annotations

import pytest
import torch
from cuda_stub import join, phase, requires_stub, run_on_stub

from opensora_sp.models.registry import model_class, resolve_config
from opensora_sp.training.sync_check import PIECE, SyncCheck
from opensora_sp.training.trainable import ShardedEma

pytestmark = requires_stub
LIMIT = 300
GATHERED = SyncCheck._gathered


def boosted(
    world: int, stage: int, precision: str, locally: bool
) -> tuple[torch.nn.Module, SyncCheck]:
    from colossalai.amp.naive_amp.grad_scaler import DynamicGradScaler

    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    # It asserts about values, and nothing is computed here.
    DynamicGradScaler._sanity_checks = lambda self: None
    join(world=world, rank=world - 1)
    with torch.device("meta"):
        model = model_class("STDiT3-XL/2")(resolve_config("STDiT3-XL/2"))
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    plugin = SequenceParallelPlugin(
        world, stage, precision, max_norm=1.0, accumulate_locally=locally
    )
    optimizer = Booster(plugin=plugin).boost(model, optimizer)[1]

    # Numbers on the stub are none, and differ.
    SyncCheck._gathered = gathered_equal
    SyncCheck._compare_batches = lambda self, *args: None
    return optimizer, SyncCheck(model, plugin.mesh, 1, optimizer.shards)


def gathered_equal(check: SyncCheck, numbers: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [(0,) for _ in GATHERED(check, numbers)]


def on_steps(world: int, stage: int, precision: str, locally: bool) -> int:
    optimizer, check = boosted(world, stage, precision, locally)
    weights = optimizer.shards.working.values()
    ema = ShardedEma(optimizer.shards.master_weights, decay=0.99)
    for step, name in enumerate(("first", "second")):
        phase("backward")
        loss = torch.stack([weight.float().sum() for weight in weights]).sum()
        optimizer.backward(loss)
        phase(name)
        taken = optimizer.step_if_finite(loss.detach())
        ema.update(step, taken)
    with phase("check"):
        check.compare(0)
    phase("end")
    return len(weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "stage", "precision", "locally"),
    [
        (8, 2, "bf16", False),
        (1, 1, "fp32", False),
        # The gradients of all micro-batches are reduced in the tail.
        (8, 1, "fp16", True),
    ],
)
def test_a_step_of_971_parameters_is_few_launches_and_no_sync(
    world: int, stage: int, precision: str, locally: bool
) -> None:
    recording = run_on_stub(on_steps, world, stage, precision, locally, timeout=300)
    assert recording.result == 971
    tail = recording.in_phase("second")
    work = len(tail.launches) + len(tail.gemms) + len(tail.copies) + len(tail.memsets)
    print(f"{world} ranks, stage {stage}, {precision}: {work} launches", tail.kernels())

    # All parameters are in it.
    assert 50 < work <= LIMIT
    assert not tail.syncs and not [copy for copy in tail.copies if copy.blocking]
    assert not tail.refused

    # A digest and a comparison with master weights for each tensor.
    check = recording.in_phase("check")
    print(f"check: {len(check.launches)} launches", check.kernels(), check.collectives)
    assert 971 < len(check.launches) < 9000
    assert [one.name for one in check.collectives] == ["all_gather_into_tensor"]
    # The numbers of all ranks are read once: of 971 weights and buffers, and of 971 master weights.
    (read,) = [copy.bytes for copy in check.copies if copy.kind == "D2H"]
    assert 8 * world * 2 * 971 <= read < 8 * world * 2 * 1000
    assert len(check.syncs) == 1
    memory = recording.peak("check")
    assert memory.allocated - memory.before < 25 * PIECE["cuda"]
