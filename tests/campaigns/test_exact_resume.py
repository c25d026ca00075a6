"""A run that was cut and started again, twice, equals the uncut run to the last bit.

After each step, every rank notes a digest of its weights, fp32 master weights, EMA weights and
moments, and what it has drawn at random. These are compared, and so are losses and the files of the
last checkpoint: their SHA-256, learning rate and position in the data.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from recorded_draws import record_draws
from restarts import content_of
from runs import losses, write_training
from worlds import in_worlds

from campaigns.case import Case, with_sample
from opensora_sp.checkpoint.tensor_file import as_bytes
from opensora_sp.config import load_train_config

STEPS_AFTER = 20
pytestmark = pytest.mark.campaign(
    bar=f"0 bits differ over the next {STEPS_AFTER} steps, in two starts", size=384
)

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)]
# Learning rate and EMA decay change with each of the first steps; epochs have two and a half.
EARLY, LATER = 2, range(4, 49, 2)
MICRO_BATCHES, CLIPS = 2, 5
# Batches that ranks share: of two clips, two ranks would hold one each and exchange nothing.
TINY = ["warmup_steps=3", "batch_size=1", "num_frames=3", "image_size=(16, 16)", "model.depth=1"]
SAMPLE = ["dp1sp1 fp32 sync early", "dp2sp1 bf16 sync early", "dp1sp2 fp32 async early"]


@dataclass(frozen=True)
class Setup:
    """How a run trains and saves."""

    dp: int
    sp: int
    precision: str
    saving: str

    @property
    def name(self) -> str:
        return f"dp{self.dp}sp{self.sp} {self.precision} {self.saving}"

    @property
    def world(self) -> int:
        return self.dp * self.sp

    @property
    def options(self) -> list[str]:
        in_background = self.saving == "async"
        own = [f"sp_size={self.sp}", f"precision={self.precision}", f"async_save={in_background}"]
        return [*TINY, *own]


@dataclass(frozen=True)
class Cut:
    """The steps after which the run is started again."""

    first: int
    second: int

    @property
    def name(self) -> str:
        return f"cut after {self.first} and {self.second}"


def cases(random: Random) -> list[Case]:
    """For each setup one early cut, and 15 later ones in one case."""
    found = []
    for (dp, sp), precision, saving in product(LAYOUTS, ("fp32", "bf16"), ("sync", "async")):
        setup = Setup(dp, sp, precision, saving)
        for when, firsts in (("early", [EARLY]), ("later", random.sample(LATER, 15))):
            cuts = [Cut(first, first + random.randrange(1, STEPS_AFTER)) for first in firsts]
            found.append(Case(f"{setup.name} {when}", (setup, cuts), trials=len(cuts)))
    return with_sample(found, SAMPLE)


@dataclass
class Trace:
    """What a rank has drawn for each micro-batch, and digests of its state after each step."""

    drawn: dict[int, tuple] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)

    def update(self, later: Trace) -> None:
        self.drawn.update(later.drawn)
        self.states.update(later.states)


def start(
    config: Path,
    outputs: Path,
    setup: Setup,
    steps: int,
    ckpt_every: int,
    source: Path | None = None,
) -> Trace:
    """Start a run, with a checkpoint of another one if there is a ``source``, up to ``steps``."""
    from opensora_sp.training import metrics
    from opensora_sp.training.run import train

    metrics.draw_loss = lambda run_dir: None
    trace = Trace()
    record_draws(trace.drawn)
    if source is not None:
        if dist.get_rank() == 0:
            shutil.copytree(source, outputs / source.name)
        dist.barrier()

    options = [f"outputs={outputs}", f"max_steps={steps}", f"ckpt_every={ckpt_every}"]
    with recorded_states(trace.states):
        train(load_train_config(config, [*options, *setup.options]), resume="auto")
    return trace


@contextmanager
def recorded_states(into: dict[int, str]) -> Iterator[None]:
    from opensora_sp.training.step import TrainingStep

    plain = TrainingStep._update

    def update(self: TrainingStep, step: int, *args: Any) -> Any:
        queued = plain(self, step, *args)
        into[step + 1] = digest_of(self.tensors)
        return queued

    with mock.patch.object(TrainingStep, "_update", update):
        yield


def digest_of(tensors: Any) -> str:
    """SHA-256 of what this rank holds of a ``TrainingState``."""
    shards, digest = tensors.shards, hashlib.sha256()
    held = [*tensors.module.state_dict().values(), *shards.master_weights.values()]
    held += tensors.ema.shards.values()
    for state in shards.states().values():
        held += [torch.as_tensor(value) for _, value in sorted(state.items())]

    for tensor in held:
        digest.update(as_bytes(tensor.detach()).numpy())
    return digest.hexdigest()


def whole_run(config: Path, root: Path, setup: Setup, steps: int) -> Trace:
    return start(config, root / "whole", setup, steps, ckpt_every=2)


def cut_runs(config: Path, root: Path, setup: Setup, cuts: list[Cut]) -> list[Trace]:
    """Two starts for each cut."""
    starts = []
    for cut in cuts:
        own, source = (config, root / cut.name, setup), root / "whole" / f"step_{cut.first:08d}"
        starts.append((setup.world, (*own, cut.second, 10, source)))
        starts.append((setup.world, (*own, cut.first + STEPS_AFTER, 10)))
    return in_worlds(start, starts)


def check(config: Path, root: Path, setup: Setup, cuts: list[Cut]) -> None:
    """Train whole and cut, in processes of their own, and compare."""
    last = max(cut.first for cut in cuts) + STEPS_AFTER
    whole = run_ranks(setup.world, whole_run, config, root, setup, last, timeout=900)
    arguments = (config, root, setup, cuts)
    of_ranks = run_ranks(setup.world, cut_runs, *arguments, timeout=3600)

    for number, cut in enumerate(cuts):
        steps = range(cut.first + 1, cut.first + STEPS_AFTER + 1)
        for rank, starts in enumerate(of_ranks):
            trace, again = starts[2 * number : 2 * number + 2]
            trace.update(again)
            compare(trace, whole[rank], steps, f"{cut.name}, rank {rank}")

        outputs = root / cut.name
        assert losses(outputs) == losses(root / "whole")[cut.first : cut.first + STEPS_AFTER]
        assert content_of(outputs, steps[-1]) == content_of(root / "whole", steps[-1])


def compare(trace: Trace, whole: Trace, steps: range, where: str) -> None:
    for step in steps:
        assert trace.states[step] == whole.states[step], f"{where}: step {step} differs"

    first, end = (step * MICRO_BATCHES for step in (steps.start - 1, steps.stop - 1))
    wanted = {number: drawn for number, drawn in whole.drawn.items() if first <= number < end}
    assert trace.drawn == wanted, f"{where}: other random numbers"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training(tmp_path_factory.mktemp("set"), CLIPS)


def test_a_cut_run_is_the_run_that_was_not_cut(case: Case, config: Path, tmp_path: Path) -> None:
    check(config, tmp_path, *case.arguments)
    # Hundreds of checkpoints.
    shutil.rmtree(tmp_path)
