"""A checkpoint does not depend on the (dp, sp) that wrote it.

Every layout of up to 8 processes reads what every other wrote, and saves the same bytes again. With
24 of these pairs, training continues in the other layout as it does in one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from plugin_cases import make_model
from ranks import run_ranks
from recorded_draws import record_draws
from runs import losses, write_training
from safetensors.torch import load_file
from worlds import in_worlds

from campaigns.case import Case, with_sample
from opensora_sp.config import load_train_config
from opensora_sp.diffusion import rank_loss, velocity_loss

pytestmark = pytest.mark.campaign(
    bar="state bit-identical; training sees the same samples and noise", size=424
)

Layout = tuple[int, int]  # dp, sp
LAYOUTS = [(dp, sp) for dp, sp in product(range(1, 9), repeat=2) if dp * sp <= 8]
GLOBAL_BATCH = 11  # which is shared by ranks, rather than whole samples distributed
TENSORS = ("model/model.safetensors", "ema/model.safetensors", "optimizer.safetensors")
SMALL = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]
SAMPLE = ["dp2sp1, small worlds", "dp1sp3, small worlds"]


def name_of(layout: Layout) -> str:
    return f"dp{layout[0]}sp{layout[1]}"


def world_of(layout: Layout) -> int:
    return layout[0] * layout[1]


def chunked(layouts: list[Layout], size: int) -> list[list[Layout]]:
    return [layouts[first : first + size] for first in range(0, len(layouts), size)]


def cases(random: Random) -> list[Case]:
    """Each layout reads what all have written, five in a case, in a drawn order."""
    parts = chunked(random.sample(LAYOUTS, len(LAYOUTS)), 5)
    found = []
    for reader, (number, writers) in product(LAYOUTS, enumerate(parts)):
        arguments = (reader, random.sample(writers, len(writers)))
        found.append(Case(f"{name_of(reader)}, part {number}", arguments, trials=len(writers)))
    for reader in ((2, 1), (1, 3)):
        found.append(Case(f"{name_of(reader)}, small worlds", (reader, SMALL), trials=len(SMALL)))
    return with_sample(found, SAMPLE)


def training_cases(random: Random) -> list[Case]:
    """Pairs of a layout that writes and another that continues; the sample is of small worlds."""
    pairs = [pair for pair in product(LAYOUTS, repeat=2) if pair[0] != pair[1]]
    found = []
    for writer, reader in random.sample(pairs, 24):
        name = f"{name_of(writer)} to {name_of(reader)}"
        found.append(Case(name, (writer, reader)))
    small = [case.name for case in found if max(map(world_of, case.arguments)) <= 4]
    return with_sample(found, small[:1])


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

    def __init__(self, layout: Layout, scale: float = 1.0) -> None:
        from opensora_sp.checkpoint.zero_shards import NamedShards
        from opensora_sp.plugin import SequenceParallelPlugin
        from opensora_sp.plugin._colossalai import Booster
        from opensora_sp.training.checkpointing import TrainingState, fixed_tensors
        from opensora_sp.training.trainable import ShardedEma

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
        mine = slice(self.mesh.dp_rank, None, self.mesh.dp_size)  # of different numbers of samples
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


def write(layout: Layout, root: Path) -> None:
    from opensora_sp.training.checkpointing import Checkpoints

    run = Trained(layout)
    for step in range(2):
        run.step(step)
    folder = Checkpoints(root / name_of(layout)).save(run.tensors, {"step": 2})
    saved = load_file(folder / "model/model.safetensors")
    if run.precision == "fp32":
        # What is saved is what the model computes with.
        for name, tensor in run.bare.state_dict().items():
            assert torch.equal(saved[name], tensor)
    moments = load_file(folder / "optimizer.safetensors")
    assert "exp_avg/final_layer.linear.weight" in moments
    assert not any("unused" in name for name in moments)


def write_all(layouts: list[Layout], root: Path) -> None:
    in_worlds(write, [(world_of(layout), (layout, root)) for layout in layouts])


def read(layout: Layout, writers: list[Layout], root: Path) -> None:
    """One boosted model loads one checkpoint after the other, and saves each again."""
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
        compare(again, source, f"written by {writer} and read by {layout}")
        dist.barrier()


def compare(again: Path, source: Path, where: str) -> None:
    ours, theirs = (
        json.loads((folder / "manifest.json").read_text())["files"] for folder in (again, source)
    )
    for name in TENSORS:
        assert ours[name] == theirs[name], f"{name} differs, {where}"


Written = Callable[[list[Layout]], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Writes the checkpoints of layouts, unless they exist, into one folder."""
    root = tmp_path_factory.mktemp("written")

    def write_missing(layouts: list[Layout]) -> Path:
        missing = [layout for layout in layouts if not (root / name_of(layout)).exists()]
        if missing:
            world = max(map(world_of, missing))
            run_ranks(world, write_all, missing, root, timeout=900)
        return root

    return write_missing


def check_one_process(root: Path, layout: Layout) -> None:
    """What a layout wrote is the state of one process; bf16 computes with other weights."""
    if LAYOUTS.index(layout) % 3 == 2:
        return
    wanted, found = (
        load_file(root / name_of(one) / "step_00000002/optimizer.safetensors")
        for one in ((1, 1), layout)
    )
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        error = (found[name] - tensor).abs().max()
        assert error <= 1e-4 * tensor.abs().max() + 1e-7, (layout, name, error)


def test_a_layout_reads_what_another_wrote(case: Case, written: Written) -> None:
    reader, writers = case.arguments
    root = written([(1, 1), *writers])
    for writer in writers:
        check_one_process(root, writer)
    run_ranks(world_of(reader), read, reader, writers, root, timeout=900)


FEW, MANY = 2, 8  # steps before and after the change of the layout


def use_sgd() -> None:
    """SGD with momentum, whose parameters show every wrong gradient."""
    from opensora_sp.training import metrics, step, step_log, trainer

    trainer.make_optimizer = lambda cfg, parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9
    )
    for module in (trainer, step, step_log):
        module.learning_rate = lambda cfg, step: 0.05
    metrics.draw_loss = lambda run_dir: None


def train(layout: Layout, config: Path, outputs: Path, steps: int) -> dict[int, tuple]:
    from opensora_sp.training import run

    drawn: dict[int, tuple] = {}
    use_sgd()
    record_draws(drawn)
    options = [f"outputs={outputs}", f"max_steps={steps}", f"ckpt_every={steps}"]
    options += [f"sp_size={layout[1]}", "micro_batches_per_step=4", "batch_size=1", "grad_clip=0.0"]
    options += ["dataset.transform=resize_random_crop", "dataset.clip_start=random"]
    options += ["mask_ratios={'image_head': 0.5}", "num_frames=3", "image_size=(16, 12)"]
    run.train(load_train_config(config, options), resume="auto")
    return drawn


def train_in_both(config: Path, outputs: Path, writer: Layout, reader: Layout) -> list:
    first = (writer, config, outputs, FEW)
    then = (reader, config, outputs, MANY)
    return in_worlds(train, [(world_of(writer), first), (world_of(reader), then)])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training(tmp_path_factory.mktemp("set"), 14)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """All steps in one process: its folder, and what it has drawn."""
    outputs = tmp_path_factory.mktemp("whole") / "run"
    (drawn,) = run_ranks(1, train, (1, 1), config, outputs, MANY)
    assert sorted(drawn) == list(range(4 * MANY))
    assert len({digest for _, _, digest, _ in drawn.values()}) == 4 * MANY, "draws are alike"
    return outputs, drawn


def check_training(config: Path, whole: tuple[Path, dict], outputs: Path, pair: tuple) -> None:
    """Ids, timesteps, noise, drops and masks are those of one process; so are losses and weights.

    Losses and weights also show the crops of the clips.
    """
    writer, reader = pair
    world = max(world_of(writer), world_of(reader))
    of_ranks = run_ranks(world, train_in_both, config, outputs, writer, reader)
    seen: set[int] = set()
    for _, drawn in of_ranks[: world_of(reader)]:
        assert drawn == {number: whole[1][number] for number in drawn}, "other samples or noise"
        seen |= set(drawn)
    assert seen == set(range(4 * FEW, 4 * MANY))

    assert losses(outputs) == pytest.approx(losses(whole[0]), rel=1e-6), "other losses"
    weights, found = (
        load_file(folder / f"step_{MANY:08d}" / "model/model.safetensors")
        for folder in (whole[0], outputs)
    )
    for name, tensor in weights.items():
        error = (found[name] - tensor).abs().max()
        assert error <= 5e-6 * tensor.abs().max(), (pair, name, error)


def test_training_continues_in_another_layout(
    training_case: Case, config: Path, whole: tuple[Path, dict], tmp_path: Path
) -> None:
    check_training(config, whole, tmp_path / "run", training_case.arguments)
