"""A bit that flips on one rank, in what all ranks must agree on, is found and named.

Bits flip in working weights, frozen weights, buffers and fp32 master weights, on every rank of
worlds of two and three. The run ends within ``check_sync_every`` steps, with the same error on all
ranks. The next two starts then end with the state of an undisturbed run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from worlds import in_worlds

from campaigns.case import Case, with_sample
from opensora_sp.config import load_train_config
from opensora_sp.training.sync_check import SyncCheck

pytestmark = pytest.mark.campaign(
    bar="found within check_sync_every, tensor and rank named", size=64
)

STEPS, SAVED = 8, 4  # a checkpoint before the flip, and one at the end
OPTIONS = [
    *("warmup_steps=3", "batch_size=1", "num_frames=3", "image_size=(16, 16)", "model.depth=1"),
    *("freeze=['t_block.*']", "micro_batches_per_step=3", f"ckpt_every={SAVED}"),
]
KINDS = ["working weight", "master weight", "frozen weight", "buffer"]
# A flipped bit of these stays until a check; the others are made anew in each step.
LASTING = ["frozen weight", "buffer"]
PLACES = [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]  # rank, world
SAMPLE = [
    "working weight of rank 1 of 2, fp32, checked each step",
    "frozen weight of rank 2 of 3, bf16, checked rarely",
]


@dataclass(frozen=True)
class Setup:
    """How a run trains."""

    world: int
    sp: int
    precision: str


@dataclass(frozen=True)
class Flip:
    """A bit of one rank, flipped at the start of ``step``, which is counted from 0.

    ``tensor``, ``element`` and ``bit`` choose it, as shares of how many there are.
    """

    kind: str
    rank: int
    setup: Setup
    check_every: int
    step: int
    tensor: float
    element: float
    bit: float

    @property
    def found_in(self) -> int:
        """The step that checks it, counted from 1."""
        return (self.step // self.check_every + 1) * self.check_every


def cases(random: Random) -> list[Case]:
    found = []
    for kind, (rank, world), precision in product(KINDS, PLACES, ("fp32", "bf16")):
        for when, check_every in (("each step", 1), ("rarely", random.choice([2, 4]))):
            setup = Setup(world, random.choice([1, world]), precision)
            flip = draw_flip(random, kind, rank, setup, check_every)
            name = f"{kind} of rank {rank} of {world}, {precision}, checked {when}"
            found.append(Case(name, flip))
    return with_sample(found, SAMPLE)


def draw_flip(random: Random, kind: str, rank: int, setup: Setup, check_every: int) -> Flip:
    steps = range(SAVED, STEPS)
    if kind not in LASTING:
        # The steps with a check.
        steps = range(SAVED + check_every - 1, STEPS, check_every)
    shares = (random.random() for _ in range(3))
    return Flip(kind, rank, setup, check_every, random.choice(steps), *shares)


def start(config: Path, outputs: Path, setup: Setup, steps: int, check_every: int) -> str:
    """Start a run up to ``steps``; returns what it raised."""
    from opensora_sp.training import metrics
    from opensora_sp.training.run import train

    metrics.draw_loss = lambda run_dir: None
    options = [f"outputs={outputs}", f"max_steps={steps}", f"check_sync_every={check_every}"]
    options += [f"precision={setup.precision}", f"sp_size={setup.sp}"]
    cfg = load_train_config(config, [*options, *OPTIONS])
    try:
        train(cfg, resume="auto")
    except ValueError as error:
        return str(error)
    return "finished"


def start_flipped(
    config: Path, outputs: Path, flip: Flip, planted: str | None
) -> tuple[str, str | None]:
    """Also returns the name of the tensor, on the rank whose bit is flipped."""
    from opensora_sp.training.step import TrainingStep

    flipped: list[str] = []
    plain = TrainingStep.run

    def step(self: TrainingStep, number: int, *args: Any) -> Any:
        if number == flip.step and dist.get_rank() == flip.rank:
            flipped.append(flip_bit(tensors_of(self, flip.kind), flip))
        return plain(self, number, *args)

    check_every = 0 if planted == "no check" else flip.check_every
    with mock.patch.object(TrainingStep, "run", step), FAULTS.get(planted, nullcontext)():
        raised = start(config, outputs, flip.setup, STEPS, check_every)
    return raised, flipped[0] if flipped else None


def tensors_of(training_step: Any, kind: str) -> dict[str, Tensor]:
    """What this rank holds, without ZeRO's padding."""
    shards, module = training_step.tensors.shards, training_step.tensors.module
    if kind == "buffer":
        return dict(module.named_buffers())
    if kind == "working weight":
        return shards.working
    if kind == "frozen weight":
        parameters = module.named_parameters()
        return {name: one for name, one in parameters if name not in shards.working}

    parts = {}
    for name, master in shards.master_weights.items():
        begin = dist.get_rank() * master.numel()
        part = master[: max(0, shards.working[name].numel() - begin)]
        if part.numel():
            parts[name] = part
    return parts


def flip_bit(tensors: dict[str, Tensor], flip: Flip) -> str:
    """Flip a bit of one of the tensors; returns its name."""
    name = sorted(tensors)[int(flip.tensor * len(tensors))]
    tensor = tensors[name].detach()
    element, size = int(flip.element * tensor.numel()), tensor.element_size()
    # Of fp32 master weights, bf16 keeps the upper half.
    lowest = 16 if flip.kind == "master weight" and flip.setup.precision == "bf16" else 0
    bit = lowest + int(flip.bit * (8 * size - lowest))

    octets = tensor.view(-1).view(torch.uint8)
    octets[element * size + bit // 8] ^= 1 << (bit % 8)
    return name


def expected_error(flip: Flip, name: str) -> str:
    """How the error begins."""
    if flip.kind == "master weight":
        return f"got a part of the working weight {name!r} on ranks [{flip.rank}] that is not the"
    if flip.setup.world == 2:
        # There is no majority.
        return f"got another weight {name!r} on ranks [1] than on ranks [0]"
    return f"got another weight {name!r} on ranks [{flip.rank}] than"


def check(config: Path, outputs: Path, flip: Flip, planted: str | None = None) -> None:
    """The first start ends with the error."""
    world = flip.setup.world
    of_ranks = run_ranks(world, start_flipped, config, outputs, flip, planted)
    raised, name = of_ranks[0][0], of_ranks[flip.rank][1]
    assert name is not None
    assert [error for error, _ in of_ranks] == [raised] * world
    wanted = expected_error(flip, name)
    assert raised.startswith(wanted), f"{raised!r} does not begin with {wanted!r}"
    assert f"in step {flip.found_in}; expected" in raised, raised


def next_starts(config: Path, outputs: Path, flip: Flip) -> list[str]:
    """One step more, and the rest."""
    worlds = []
    for steps in (SAVED + 1, STEPS):
        arguments = (config, outputs, flip.setup, steps, flip.check_every)
        worlds.append((flip.setup.world, arguments))
    return in_worlds(start, worlds)


def final_state(outputs: Path) -> dict[str, str]:
    files = json.loads((outputs / f"step_{STEPS:08d}" / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith("safetensors")}


@pytest.fixture(scope="module")
def undisturbed(
    config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Setup], dict[str, str]]:
    """The final state of an undisturbed run, which is checked in each step."""
    root = tmp_path_factory.mktemp("undisturbed")

    @cache
    def state_of(setup: Setup) -> dict[str, str]:
        outputs = root / str(setup)
        finished = run_ranks(setup.world, start, config, outputs, setup, STEPS, 1)
        assert finished == ["finished"] * setup.world
        return final_state(outputs)

    return state_of


def test_a_flipped_bit_is_named_and_the_next_starts_are_as_undisturbed(
    case: Case,
    config: Path,
    undisturbed: Callable[[Setup], dict[str, str]],
    tmp_path: Path,
    record_property: Callable[[str, float], None],
) -> None:
    flip: Flip = case.arguments
    check(config, tmp_path / "run", flip)
    record_property("steps to detection", flip.found_in - flip.step)

    of_ranks = run_ranks(flip.setup.world, next_starts, config, tmp_path / "run", flip)
    assert of_ranks == [["finished", "finished"]] * flip.setup.world
    assert final_state(tmp_path / "run") == undisturbed(flip.setup)


# Controls


def without_buffers() -> Any:
    return mock.patch.object(
        SyncCheck, "_replicated", lambda self: dict(self.module.named_parameters())
    )


def without_masters() -> Any:
    return mock.patch.object(SyncCheck, "_unlike_masters", lambda self: {})


FAULTS: dict[str | None, Callable[[], Any]] = {
    "buffers not compared": without_buffers,
    "master weights not compared": without_masters,
}


@pytest.mark.parametrize(
    ("kind", "planted"),
    [
        ("frozen weight", "no check"),
        ("buffer", "buffers not compared"),
        ("master weight", "master weights not compared"),
    ],
)
def test_control_what_is_not_compared(
    config: Path, tmp_path: Path, kind: str, planted: str
) -> None:
    flip = Flip(kind, 1, Setup(2, 1, "fp32"), 1, 6, 0.5, 0.5, 0.1)
    with pytest.raises(AssertionError, match="'finished' does not begin with"):
        check(config, tmp_path / "run", flip, planted)
