"""The page's custom training loops: DistributedDataParallel and a bare loop; and the Booster's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plugin_cases import GLOBAL_BATCH, STEPS, make_batch, make_model, one_process
from ranks import run_ranks
from runs import run_forked
from torch.nn.parallel import DistributedDataParallel
from worlds import in_worlds

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.parallel import SequenceMesh, parallelize, unwrap

PAGE = Path(__file__).parents[2] / "docs" / "custom_training_loop.md"


def steps(sp_size: int, with_ddp: bool, shards: bool) -> None:
    mesh, bare = SequenceMesh(sp_size), make_model()
    model = parallelize(bare, mesh)
    if with_ddp:
        model = DistributedDataParallel(model)
    trained = [p for p in bare.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    wanted, norms = one_process()

    for step in range(STEPS):
        micro = {
            name: value[mesh.dp_rank :: mesh.dp_size] for name, value in make_batch(step).items()
        }
        if shards:
            losses = velocity_loss(model(**micro, output="shards"), -micro["x"])
            loss = rank_loss(losses, global_samples=GLOBAL_BATCH, world_size=mesh.world_size)
        else:
            # Replicas have different numbers of samples.
            losses = velocity_loss(model(**micro), -micro["x"])
            loss = losses.sum() * mesh.dp_size / GLOBAL_BATCH
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
    moved = [
        name
        for name, p in unwrap(scope["model"].module).named_parameters()
        if not torch.equal(p, before[name])
    ]
    assert len(moved) > 40 and len(taken) == 2


def all_of_it() -> None:
    # From here on an import of these is an error.
    sys.modules |= {
        "colossalai": None,
        "opensora_sp.plugin": None,
    }
    cases = [
        (2, (2, True, True)),
        (4, (2, True, False)),
        (3, (3, False, True)),
        (4, (2, False, False)),
    ]
    in_worlds(steps, cases)
    loop_of_the_page()


def write_booster_loop(folder: Path, steps: int) -> Path:
    """The page's program with a small model, in fp32."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (program,) = [block for block in blocks if "Booster" in block]
    small = "in_channels=2, hidden_size=24, depth=2, num_heads=2, mlp_ratio=2.0, "
    small += "caption_channels=5, model_max_length=6"

    for old, new in [
        ('build_model("STDiT3-XL/2")', f'build_model("STDiT3", {small})'),
        ("STEPS, SAVE_EVERY, BATCH = 1000, 100, 8", f"STEPS, SAVE_EVERY, BATCH = {steps}, 2, 4"),
        ("LATENTS, TEXT = (4, 16, 32, 32), (300, 4096)", "LATENTS, TEXT = (2, 5, 6, 8), (6, 5)"),
        ('Path("checkpoints")', f"Path({str(folder / 'checkpoints')!r})"),
        ('precision="bf16"', 'precision="fp32"'),
    ]:
        assert program.count(old) == 1, old
        program = program.replace(old, new)

    (folder / "loop.py").write_text(program)
    return folder / "loop.py"


def losses_of(program: Path, ranks: int) -> dict[int, float]:
    done = run_forked(program, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", done.stdout)
    }


@pytest.mark.slow
def test_the_booster_loop_of_the_page_resumes(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = losses_of(write_booster_loop(tmp_path / "whole", 5), 2)
    assert list(whole) == [1, 2, 3, 4, 5] and len(set(whole.values())) == 5

    parts = losses_of(write_booster_loop(tmp_path / "parts", 3), 2)
    assert parts == {step: whole[step] for step in (1, 2, 3)}
    (
        tmp_path / "parts/checkpoints/step_00000003/state.json"
    ).unlink()  # as if killed while it saved
    resumed = losses_of(write_booster_loop(tmp_path / "parts", 5), 2)
    assert resumed == {step: whole[step] for step in (3, 4, 5)}


def test_ddp_and_a_bare_loop_are_one_process() -> None:
    run_ranks(4, all_of_it)
