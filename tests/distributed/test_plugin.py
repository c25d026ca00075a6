"""The Booster plugin: a step on any (dp, sp) is the one-process step; data, arguments, loops."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plugin_cases import GLOBAL_BATCH, STEPS, make_batch, make_model, one_process
from ranks import run_ranks
from torch.utils.data import TensorDataset

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.parallel import CommLedger

README = Path(__file__).parents[2] / "README.md"


def boosted_cases(cases: list[tuple[int, int, int]]) -> list[int]:
    """Switches between layouts that this rank has made in each case."""
    switches = []
    for case in cases:
        with CommLedger() as counter:
            boosted_steps(*case)
        switches.append(counter.calls["switch", "backward"])
    return switches


def boosted_steps(sp_size: int, stage: int, accumulate: int) -> None:
    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    plugin = SequenceParallelPlugin(sp_size=sp_size, stage=stage, precision="fp32", max_norm=0.5)
    assert type(plugin).__name__ == "SequenceParallelPlugin" and "cpu" in plugin.supported_devices()
    bare = make_model()
    optimizer = torch.optim.SGD(
        [p for p in bare.parameters() if p.requires_grad], lr=0.05, momentum=0.9
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(bare, optimizer)
    assert model.unwrap() is bare
    wanted, norms = one_process()
    mesh = plugin.mesh
    for step in range(STEPS):
        batch = make_batch(step)
        for part in range(accumulate):
            mine = slice(mesh.dp_rank * accumulate + part, None, mesh.dp_size * accumulate)
            micro = {name: value[mine] for name, value in batch.items()}
            losses = velocity_loss(model(**micro, output="shards"), -micro["x"])
            loss = rank_loss(losses, global_samples=GLOBAL_BATCH, world_size=mesh.world_size)
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        assert abs(optimizer.get_grad_norm() - norms[step]) <= 1e-5 * norms[step]
    for name, parameter in bare.named_parameters():
        difference = (parameter - wanted[name]).abs().max() / wanted[name].abs().max()
        assert difference < 2e-6, f"{name} differs by {difference}"


@pytest.mark.core
@pytest.mark.parametrize(
    ("world", "cases"),  # cases: sp_size, ZeRO stage, micro-batches accumulated
    [(2, [(2, 2, 1), (1, 1, 3), (2, 1, 2)]), (3, [(3, 2, 2)]), (4, [(2, 2, 1), (4, 1, 3)])],
)
def test_steps_equal_one_process(world: int, cases: list[tuple[int, int, int]]) -> None:
    switches = zip(*run_ranks(world, boosted_cases, cases), strict=True)
    for (sp_size, *_), of_ranks in zip(cases, switches, strict=True):
        assert any(of_ranks) == (sp_size > 1)


def loop_of_the_readme() -> None:
    """The README's snippet as it stands, with a small model, and one step of it."""
    snippet = re.search(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)[1]
    dataset = TensorDataset(*(make_batch(0)[name] for name in ("x", "timestep", "y")))
    scope: dict = {"dataset": dataset, "small_model": make_model}
    exec(snippet.replace('build_model("STDiT3-XL/2")', "small_model()"), scope)
    for x, timestep, y in scope["dataloader"]:
        loss = scope["model"](x, timestep, y).square().mean()
        scope["optimizer"].backward(loss)
        scope["optimizer"].step()
        break
    assert scope["optimizer"].get_grad_norm() > 0 and "small_model()" not in snippet


def test_the_loop_of_the_readme() -> None:
    run_ranks(2, loop_of_the_readme)


def replica_of_this_rank() -> tuple[tuple, list[list[int]]]:
    from opensora_sp.plugin import SequenceParallelPlugin

    plugin = SequenceParallelPlugin(sp_size=2, precision="fp32")
    loader = plugin.prepare_dataloader(
        TensorDataset(torch.arange(10)), batch_size=2, shuffle=True, seed=7
    )
    mesh = plugin.mesh
    groups = [dist.get_process_group_ranks(group) for group in (mesh.dp_group, mesh.sp_group)]
    place = (mesh.dp_size, mesh.dp_rank, groups[0], mesh.sp_size, mesh.sp_rank, groups[1])
    return place, [batch.tolist() for (batch,) in loader]


def test_the_mesh_and_data_per_replica() -> None:
    places, batches = zip(*run_ranks(4, replica_of_this_rank), strict=True)
    assert list(places) == [
        (2, 0, [0, 2], 2, 0, [0, 1]),
        (2, 0, [1, 3], 2, 1, [0, 1]),
        (2, 1, [0, 2], 2, 0, [2, 3]),
        (2, 1, [1, 3], 2, 1, [2, 3]),
    ]
    assert batches[0] == batches[1] and batches[2] == batches[3]
    first, second = set(chain.from_iterable(batches[0])), set(chain.from_iterable(batches[2]))
    assert not first & second


def refusals() -> None:
    from colossalai.nn.optimizer import Lamb
    from mmengine.config import Config

    from opensora_sp.plugin import SequenceParallelPlugin
    from opensora_sp.plugin._colossalai import Booster

    for arguments, message in [
        (dict(sp_size=2), "got sp_size 2 with 1 processes; expected an sp_size that divides"),
        (dict(stage=3), "got ZeRO stage 3; expected 1 or 2"),
        (dict(precision="fp8"), "got precision 'fp8'"),
        (dict(precision="fp16"), "fp16 training needs CUDA"),
        (dict(sequence_parallel=dict(strategy="ring")), "got strategy 'ring'; expected one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            SequenceParallelPlugin(**arguments)
    with pytest.raises(ValueError, match="got 3 samples for 1 replicas and batch_size 4, not one"):
        SequenceParallelPlugin(precision="fp32").prepare_dataloader(
            TensorDataset(torch.ones(3)), 4, drop_last=True
        )
    plugin = SequenceParallelPlugin.from_config(
        Config(dict(sp_size=1, zero_stage=1, grad_clip=0.5))
    )
    assert (plugin.stage, plugin.precision, plugin.zero_optim_kwargs["clip_grad_norm"]) == (
        1,
        "bf16",
        0.5,
    )
    overlapping = SequenceParallelPlugin.from_config(Config(dict(overlap_communication=True)))
    assert not overlapping.zero_optim_kwargs["overlap_communication"]  # on CPU
    model, booster = make_model(), Booster(plugin=SequenceParallelPlugin(precision="fp32"))
    final = model.final_layer.linear
    model.requires_grad_(False)
    final.requires_grad_()
    groups = [dict(params=model.spatial_blocks.parameters()), dict(params=final.parameters())]
    for refused, message in [
        (Lamb(final.parameters()), "got optimizer Lamb, which ColossalAI replaces"),
        (torch.optim.AdamW(groups), "whose first of 2 parameter groups holds no trainable"),
    ]:
        with pytest.raises(ValueError, match=message):
            booster.boost(model, refused)
    # Nothing was left on the model.
    _, optimizer, *_ = booster.boost(model, torch.optim.AdamW(groups[::-1]))
    assert len(optimizer.shards.master_weights) == 2
    # Without sharding points and without sequence parallelism: plain ZeRO.
    plain = torch.nn.Linear(2, 2)
    Booster(plugin=SequenceParallelPlugin(precision="fp32")).boost(
        plain, torch.optim.AdamW(plain.parameters())
    )


def test_arguments_that_do_not_fit_are_refused() -> None:
    run_ranks(1, refusals)
