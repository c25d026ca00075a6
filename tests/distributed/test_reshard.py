"""Checkpoints do not depend on the (dp, sp) that wrote them.

Every layout of up to 8 processes reads every other's: in CI 24 of the 400 ordered pairs, with
``make test-reshard`` all.
"""

from __future__ import annotations

import json
import shutil
from itertools import chain, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plugin_cases import make_model
from ranks import run_ranks
from recorded_draws import record_draws
from runs import TRAIN, write_toy_set
from safetensors.torch import load_file
from tiers import sample_or_grid
from worlds import TRAINING, in_worlds

from opensora_sp.config import load_train_config
from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.training.metrics import read_metrics

LAYOUTS = [(dp, sp) for dp, sp in product(range(1, 9), repeat=2) if dp * sp <= 8]
GLOBAL_BATCH = 8
TENSORS = ("model/model.safetensors", "ema/model.safetensors", "optimizer.safetensors")


def name_of(layout: tuple[int, int]) -> str:
    return f"dp{layout[0]}sp{layout[1]}"


def pairs(grid: bool) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each layout that reads, those that wrote."""
    if grid:
        return dict.fromkeys(LAYOUTS, LAYOUTS)
    readers = [(1, 1), (2, 2), (1, 3), (5, 1), (1, 5), (2, 3), (4, 2), (1, 8)]
    return {
        reader: [LAYOUTS[(3 * i + k) % 20] for k in range(3)] for i, reader in enumerate(readers)
    }


def model_with_an_unused_parameter(scale: float = 1.0) -> torch.nn.Module:
    torch.manual_seed(0)  # for its buffers
    model = make_model()
    model.unused = torch.nn.Parameter(torch.arange(5.0))  # trainable, and never given a gradient
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


class Trained:
    """A boosted model with its average; stage and precision depend on the layout."""

    def __init__(self, layout: tuple[int, int], scale: float = 1.0) -> None:
        from opensora_sp.plugin import NamedShards, SequenceParallelPlugin
        from opensora_sp.plugin._colossalai import Booster
        from opensora_sp.training.checkpointing import TrainingState, fixed_tensors
        from opensora_sp.training.ema import ShardedEma

        place = LAYOUTS.index(layout)
        self.stage, self.precision = 1 + place % 2, "bf16" if place % 3 == 2 else "fp32"
        plugin = SequenceParallelPlugin(
            sp_size=layout[1], stage=self.stage, precision=self.precision
        )
        self.bare = model_with_an_unused_parameter(scale)
        fixed = fixed_tensors(self.bare)
        trained = [p for p in self.bare.parameters() if p.requires_grad]
        groups = [
            dict(params=trained[::2], weight_decay=0.1),
            dict(params=trained[1::2], weight_decay=0.0),
        ]
        self.booster, self.mesh = Booster(plugin=plugin), plugin.mesh
        self.model, self.optimizer, *_ = self.booster.boost(
            self.bare, torch.optim.AdamW(groups, lr=1e-3)
        )
        shards = NamedShards(self.bare, self.optimizer)
        self.tensors = TrainingState(
            self.bare, fixed, shards, ShardedEma(shards.master_weights, 0.9)
        )

    def step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(GLOBAL_BATCH, 2, 5, 6, 6, generator=generator)
        timestep = torch.rand(GLOBAL_BATCH, generator=generator) * 1000
        y = torch.randn(GLOBAL_BATCH, 1, 6, 5, generator=generator)
        mine = slice(self.mesh.dp_rank, None, self.mesh.dp_size)  # replicas of 2 samples and of 1
        losses = velocity_loss(
            self.model(x[mine], timestep[mine], y[mine], output="shards"), -x[mine]
        )
        self.booster.backward(
            rank_loss(losses, global_samples=GLOBAL_BATCH, world_size=self.mesh.world_size),
            self.optimizer,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tensors.ema.update(step, torch.tensor(True))


def write(layout: tuple[int, int], root: Path) -> None:
    from opensora_sp.training.checkpointing import Checkpoints

    run = Trained(layout)
    for step in range(2):
        run.step(step)
    folder = Checkpoints(root / name_of(layout)).save(run.tensors, {"step": 2})
    saved = load_file(folder / "model/model.safetensors")
    if run.precision == "fp32":  # what is saved is what the model computes with
        assert all(
            torch.equal(saved[name], tensor) for name, tensor in run.bare.state_dict().items()
        )
    moments = load_file(folder / "optimizer.safetensors")
    assert "exp_avg/final_layer.linear.weight" in moments and not any(
        "unused" in name for name in moments
    )


def read(layout: tuple[int, int], writers: list[tuple[int, int]], root: Path) -> int:
    """One boosted model takes over one checkpoint after the other, and saves what it has."""
    from opensora_sp.training.checkpointing import Checkpoints

    run = Trained(layout, scale=-3.0)
    run.step(7)  # so that there is state to be replaced
    checkpoints = Checkpoints(root / f"read by {name_of(layout)}", keep_last=1)
    for writer in writers:
        source = root / name_of(writer) / "step_00000002"
        state = run.tensors.load(source)
        assert len(state["parameter_groups"]) == 2
        again = checkpoints.save(run.tensors, {"step": state["step"]})
        dist.barrier()
        ours, theirs = (
            json.loads((f / "manifest.json").read_text())["files"] for f in (again, source)
        )
        for name in TENSORS:
            assert ours[name] == theirs[name], (
                f"{name} written by {writer} is another one read by {layout}"
            )
        dist.barrier()
    return len(writers)


def write_and_read_all(root: Path, grid: bool) -> int:
    in_worlds(write, [(dp * sp, ((dp, sp), root)) for dp, sp in LAYOUTS], TRAINING)
    done = in_worlds(
        read, [(dp * sp, ((dp, sp), writers, root)) for (dp, sp), writers in pairs(grid).items()]
    )
    return sum(count or 0 for count in done)


@pytest.mark.slow
@sample_or_grid
def test_every_layout_reads_what_any_other_wrote(tmp_path: Path, grid: bool) -> None:
    counts = run_ranks(8, write_and_read_all, tmp_path, grid, timeout=3000 if grid else 900)
    assert len(LAYOUTS) == 20 and counts[0] == (400 if grid else 24)
    wanted = load_file(tmp_path / "dp1sp1/step_00000002/optimizer.safetensors")
    # What was written is the one-process state.
    for place, layout in enumerate(LAYOUTS):
        if place % 3 != 2:
            found = load_file(tmp_path / name_of(layout) / "step_00000002/optimizer.safetensors")
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                error = (found[name] - tensor).abs().max()
                assert error <= 1e-4 * tensor.abs().max() + 1e-7, (layout, name, error)


RING = [(1, 1), (2, 2), (1, 3), (4, 1), (1, 4), (2, 1)]  # each resumes from the one before
FEW, MANY = 2, 12


def use_sgd() -> None:
    from opensora_sp.training import metrics, trainer

    trainer.make_optimizer = lambda cfg, parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9
    )
    trainer.learning_rate = lambda cfg, step: 0.05
    trainer.draw_loss = metrics.draw_loss = lambda run_dir: None


def trained(
    layout: tuple[int, int], config: Path, outputs: Path, steps: int, resume: bool
) -> dict[int, tuple]:
    from opensora_sp.training import train

    drawn: dict[int, tuple] = {}
    use_sgd()
    record_draws(drawn)
    options = [
        f"outputs={outputs}",
        f"max_steps={steps}",
        f"ckpt_every={steps}",
        f"sp_size={layout[1]}",
    ]
    options += ["micro_batches_per_step=4", "batch_size=2", "grad_clip=0.0"]
    train(load_train_config(config, options), resume="auto" if resume else None)
    return drawn


def train_around_the_ring(config: Path, root: Path) -> list:
    whole = in_worlds(trained, [(1, ((1, 1), config, root / "whole", MANY, False))], TRAINING)
    parts = in_worlds(
        trained,
        [(dp * sp, ((dp, sp), config, root / name_of((dp, sp)), FEW, False)) for dp, sp in RING],
    )
    if dist.get_rank() == 0:
        for i, layout in enumerate(RING):
            source = root / name_of(RING[i - 1]) / "step_00000002"
            shutil.copytree(source, root / f"{name_of(layout)} resumed" / source.name)

    dist.barrier()
    more = [
        (dp * sp, ((dp, sp), config, root / f"{name_of((dp, sp))} resumed", MANY, True))
        for dp, sp in RING
    ]
    return [*whole, *parts, *in_worlds(trained, more)]


@pytest.mark.slow
def test_training_resumes_in_another_layout(tmp_path: Path) -> None:
    """SGD with momentum, whose parameters show every wrong gradient; ten steps after the change."""
    manifest = write_toy_set(tmp_path / "set", 14)
    config = tmp_path / "set" / "config.py"
    config.write_text(TRAIN.format(manifest=str(manifest)))
    of_ranks = run_ranks(4, train_around_the_ring, config, tmp_path, timeout=900)
    whole = of_ranks[0][0]

    assert sorted(whole) == list(range(4 * MANY))
    losses = [line["loss"] for line in read_metrics(tmp_path / "whole")]
    weights = load_file(tmp_path / "whole" / f"step_{MANY:08d}" / "model/model.safetensors")
    for i, layout in enumerate(RING):
        drawn = [of_rank[1 + len(RING) + i] for of_rank in of_ranks[: layout[0] * layout[1]]]
        assert set(chain.from_iterable(drawn)) == set(range(4 * FEW, 4 * MANY))
        for of_rank in drawn:  # ids, timesteps, noise, drops
            assert of_rank == {m: whole[m] for m in of_rank}
        outputs = tmp_path / f"{name_of(layout)} resumed"
        assert [line["loss"] for line in read_metrics(outputs)] == pytest.approx(
            losses[FEW:], rel=1e-6
        ), layout
        found = load_file(outputs / f"step_{MANY:08d}" / "model/model.safetensors")
        for name, tensor in weights.items():
            error = (found[name] - tensor).abs().max()
            assert error <= 5e-6 * tensor.abs().max(), (layout, name, error)
