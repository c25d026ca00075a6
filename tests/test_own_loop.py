"""Without ColossalAI: DistributedDataParallel and a bare loop around a parallelized model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks
from test_plugin import GLOBAL_BATCH, STEPS, make_batch, make_model, one_process
from torch.nn.parallel import DistributedDataParallel
from worlds import in_worlds

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.parallel import SequenceMesh, parallelize, unwrap

PAGE = Path(__file__).parent.parent / "docs" / "own_loop.md"


def steps(sp_size: int, with_ddp: bool, shards: bool) -> None:
    mesh, bare = SequenceMesh(sp_size), make_model()
    model = parallelize(bare, mesh)
    if with_ddp:
        model = DistributedDataParallel(model)
    trained = [p for p in bare.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    wanted, norms = one_process()
    for step in range(STEPS):
        micro = {name: value[mesh.dp_rank :: mesh.dp_size] for name, value in make_batch(step).items()}
        if shards:
            losses = velocity_loss(model(**micro, output="shards"), -micro["x"])
            loss = rank_loss(losses, global_samples=GLOBAL_BATCH, world_size=mesh.world_size)
        else:
            loss = velocity_loss(model(**micro), -micro["x"]).mean()
        loss.backward()
        if not with_ddp:
            for parameter in trained:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        assert abs(norm.item() - norms[step]) <= 1e-5 * norms[step]
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in unwrap(bare).named_parameters():
        difference = (parameter - wanted[name]).abs().max() / wanted[name].abs().max()
        assert difference < 2e-6, f"{name} differs by {difference}"


def loop_of_the_page() -> None:
    taken = []

    def batches_of(replica: int) -> Iterator[tuple]:
        for step in range(2):
            taken.append((replica, step))
            yield tuple(make_batch(step)[name][replica::2] for name in ("x", "timestep", "y"))

    snippet = re.search(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[1]
    assert 'build_model("STDiT3-XL/2")' in snippet
    scope: dict = {"small_model": make_model, "batches_of": batches_of}
    exec(snippet.replace('build_model("STDiT3-XL/2")', "small_model()"), scope)
    before = dict(make_model().named_parameters())
    moved = [name for name, p in unwrap(scope["model"].module).named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) > 40 and len(taken) == 2


def all_of_it() -> None:
    sys.modules |= {"colossalai": None, "opensora_sp.plugin": None}  # to import them is an error from here on
    cases = [(2, (2, True, True)), (4, (2, True, False)), (3, (3, False, True)), (4, (2, False, False))]
    in_worlds(steps, cases)
    loop_of_the_page()


def test_ddp_and_a_bare_loop_are_one_process() -> None:
    run_ranks(4, all_of_it)
