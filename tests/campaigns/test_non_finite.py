"""NaN, infinity and overflow, wherever they arise: no rank learns anything from them.

All ranks take or skip the same steps. A skipped step changes no byte of master weights, moments and
EMA weights. What is not finite is never saved, the last good checkpoint is kept, and the next two
starts resume from it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from restarts import TINY
from runs import write_training
from safetensors.torch import load_file
from worlds import TRAINING, in_worlds

from campaigns.case import Case, with_sample
from opensora_sp.checkpoint import verify
from opensora_sp.checkpoint.paths import committed_checkpoints

pytestmark = pytest.mark.campaign(
    bar="same decision on all ranks, no byte changed, the last good checkpoint kept", size=96
)

STEPS = 6
MAX_BAD_STEPS = 3
FIRST = 3  # the first step that is not finite
PATTERNS = {
    "once": (3,),
    "alternating": (3, 5),
    "twice": (3, 4),
    "to the end": tuple(range(FIRST, STEPS + 1)),
}
VALUES = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}
# These stay as they are until a checkpoint replaces them.
LASTING = ("master weight", "exp_avg", "exp_avg_sq", "EMA weight")
# A step sets the working weights to the master weights, a skipped one too.
PASSING = ("loss", "gradient", "overflow", "working weight")
LAYOUTS = {
    "sp 2": (2, ("sp_size=2",)),
    "dp 2": (2, ("sp_size=1", "micro_batches_per_step=2")),
    "sp 3": (3, ("sp_size=3",)),
}
SMALL = (*TINY, "micro_batches_per_step=1")
TENSORS = ("model/model.safetensors", "ema/model.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class Fault:
    """Numbers that are not finite, of one rank.

    Attributes:
        place: of ``PASSING`` or ``LASTING``.
        steps: counted from 1, those of a passing fault; a lasting one begins with the first.
        options: of the config.
    """

    place: str
    value: float
    rank: int
    steps: tuple[int, ...]
    layout: str
    precision: str
    options: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return LAYOUTS[self.layout][0]

    def config_options(self) -> list[str]:
        limits = (f"precision={self.precision}", f"max_bad_steps={MAX_BAD_STEPS}")
        return [*SMALL, *LAYOUTS[self.layout][1], *limits, *self.options]

    @property
    def ends_the_run(self) -> bool:
        return self.place in LASTING or len(self.steps) >= MAX_BAD_STEPS


def cases(random: Random) -> list[Case]:
    """Each place on each rank; value, pattern, precision and saving are drawn."""
    drawn = []
    for layout, (world_size, _) in LAYOUTS.items():
        for rank in range(world_size):
            for pattern in PATTERNS:
                drawn += [draw(random, place, rank, layout, pattern) for place in PASSING[:-1]]
            drawn += [draw(random, place, rank, layout, "to the end") for place in LASTING]

    # Which of a working weight's copies is used, the layout decides.
    for layout, rank in (("sp 2", 0), ("sp 2", 1), ("dp 2", 0), ("dp 2", 1), ("sp 3", 2)):
        drawn.append(draw(random, "working weight", rank, layout, "once"))

    sample = [
        "gradient on rank 1 of sp 2, alternating",
        "loss on rank 0 of dp 2, to the end",
        "master weight on rank 1 of sp 2, to the end",
    ]
    return with_sample(drawn, sample)


def draw(random: Random, place: str, rank: int, layout: str, pattern: str) -> Case:
    value = random.choice(list(VALUES.values()))
    precision = random.choice(["fp32", "bf16"])
    options = (
        f"zero_stage={random.choice([1, 2])}",
        f"ckpt_every={random.choice([1, 2])}",
        f"keep_last={random.choice([1, None])}",
        f"async_save={random.choice([True, False])}",
        f"log_every={random.choice([1, 100])}",
    )
    fault = Fault(place, value, rank, PATTERNS[pattern], layout, precision, options)
    return Case(f"{place} on rank {rank} of {layout}, {pattern}", fault)


@dataclass
class Seen:
    """What a rank saw of one training.

    Attributes:
        decisions: whether each step was taken, by its number.
        changed: whether the step changed a byte of this rank's shards.
        kept: the checkpoints at the end of a run that failed, all of which are good.
    """

    outcome: str = ""
    decisions: dict[int, bool] = field(default_factory=dict)
    changed: dict[int, bool] = field(default_factory=dict)
    kept: list[Path] = field(default_factory=list)


def starts(config: Path, outputs: Path, fault: Fault | None, options: list[str]) -> list[Seen]:
    """In a rank: the training with the fault and the next two starts, each in a new world."""
    ends = [STEPS, STEPS, STEPS + 1] if fault is not None else [STEPS, STEPS + 1]
    of_starts: list[tuple[int, tuple]] = []
    for number, end in enumerate(ends):
        planted = fault if number == 0 else None
        lines = [f"outputs={outputs}", *options, f"max_steps={end}"]
        of_starts.append((dist.get_world_size(), (config, lines, planted)))
    return in_worlds(start, of_starts, TRAINING)


def start(config: Path, options: list[str], fault: Fault | None) -> Seen:
    """Train once, with the fault if there is one, and look at each step."""
    from opensora_sp.config import load_train_config
    from opensora_sp.training import metrics
    from opensora_sp.training.run import train

    seen = Seen()
    with ExitStack() as planted:
        planted.enter_context(mock.patch.object(metrics, "draw_loss", lambda run_dir: None))
        planted.enter_context(observed(seen))
        if fault is not None and fault.rank == dist.get_rank():
            planted.enter_context(PLANTED[fault.place](fault))

        try:
            train(load_train_config(config, options), resume="auto")
            seen.outcome = "finished"
        except ValueError as error:
            seen.outcome = str(error)
            seen.kept = good_checkpoints(Path(options[0].removeprefix("outputs=")))
    return seen


@contextmanager
def observed(seen: Seen) -> Iterator[None]:
    from opensora_sp.training.step import TrainingStep
    from opensora_sp.training.step_log import StepLog

    update, count = TrainingStep._update, StepLog.count

    def observed_update(self: Any, step: int, *args: Any) -> Any:
        before = digest_of(self)
        queued = update(self, step, *args)
        seen.changed[step + 1] = digest_of(self) != before
        return queued

    def observed_count(self: Any, outcome: Any) -> None:
        seen.decisions[outcome.step] = outcome.taken
        count(self, outcome)

    with (
        mock.patch.object(TrainingStep, "_update", observed_update),
        mock.patch.object(StepLog, "count", observed_count),
    ):
        yield


def digest_of(training_step: Any) -> str:
    """Of this rank's shards of master weights, moments and EMA weights."""
    digest = hashlib.sha256()
    shards = training_step.tensors.shards
    for tensors in (
        shards.master_weights,
        training_step.tensors.ema.shards,
        *shards.states().values(),
    ):
        for tensor in tensors.values():
            tensor = torch.as_tensor(tensor).detach().cpu().contiguous()
            digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def losses_changed(fault: Fault) -> Iterator[None]:
    """NaN has NaN gradients; infinity is added, so that the gradients are finite."""
    from opensora_sp.diffusion import RectifiedFlow

    plain = RectifiedFlow.losses

    def losses(self: Any, *args: Any) -> torch.Tensor:
        found = plain(self, *args)
        if not is_struck():
            return found
        if fault.place == "overflow":
            # Finite before, but neither the loss nor its gradients are.
            return found * 3e38 * 3e38
        return found * math.nan if math.isnan(fault.value) else found + fault.value

    with (
        counted_steps(fault) as is_struck,
        mock.patch.object(RectifiedFlow, "losses", losses),
    ):
        yield


@contextmanager
def gradient_changed(fault: Fault) -> Iterator[None]:
    """One number of one gradient of this rank, before the ranks sum theirs."""
    from opensora_sp.training.trainer import Trainer

    build = Trainer._build_model

    def build_model(self: Any, *args: Any) -> Any:
        model = build(self, *args)

        def change(gradient: torch.Tensor) -> torch.Tensor:
            if not is_struck():
                return gradient
            changed = gradient.clone()
            changed.view(-1)[-1] = fault.value
            return changed

        model.final_layer.linear.bias.register_hook(change)
        return model

    with (
        counted_steps(fault) as is_struck,
        mock.patch.object(Trainer, "_build_model", build_model),
    ):
        yield


@contextmanager
def counted_steps(fault: Fault) -> Iterator[Callable[[], bool]]:
    """Yields whether the fault strikes in the current step."""
    from opensora_sp.training.step import TrainingStep

    plain, current = TrainingStep.run, [0]

    def step(self: Any, number: int, *args: Any) -> Any:
        current[0] = number + 1
        return plain(self, number, *args)

    with mock.patch.object(TrainingStep, "run", step):
        yield lambda: current[0] in fault.steps


@contextmanager
def tensor_changed(fault: Fault) -> Iterator[None]:
    """One number that this rank holds, as by a bit flip, before the first of the steps."""
    from opensora_sp.training.step import TrainingStep

    plain = TrainingStep.run

    def step(self: Any, number: int, *args: Any) -> Any:
        if number + 1 == fault.steps[0]:
            with torch.no_grad():
                tensor_of(self, fault.place).view(-1)[0] = fault.value
        return plain(self, number, *args)

    with mock.patch.object(TrainingStep, "run", step):
        yield


def tensor_of(training_step: Any, place: str) -> torch.Tensor:
    shards = training_step.tensors.shards
    if place == "working weight":
        # Every clip's loss depends on it.
        return shards.working["final_layer.linear.bias"].data
    name = next(iter(shards.master_weights))
    if place in ("exp_avg", "exp_avg_sq"):
        return shards.states()[name][place]
    return {"master weight": shards.master_weights, "EMA weight": training_step.tensors.ema.shards}[
        place
    ][name]


PLANTED: dict[str, Callable[[Fault], Any]] = {
    "loss": losses_changed,
    "overflow": losses_changed,
    "gradient": gradient_changed,
    **dict.fromkeys((*LASTING, "working weight"), tensor_changed),
}


@dataclass
class Ground:
    """The clips, and what runs without a fault end with."""

    config: Path
    root: Path
    _whole: dict[tuple[str, str], Path] = field(default_factory=dict)

    def whole(self, fault: Fault) -> Path:
        """A run without a fault, of the same layout and precision; it keeps all checkpoints."""
        key = fault.layout, fault.precision
        if key not in self._whole:
            self._whole[key] = self.root / " ".join(key)
            saving = replace(fault, options=("ckpt_every=1", f"max_steps={STEPS + 1}"))
            options = [f"outputs={self._whole[key]}", *saving.config_options()]
            run_ranks(fault.world_size, start, self.config, options, None)
        return self._whole[key]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    folder = tmp_path_factory.mktemp("non finite")
    return Ground(write_training(folder / "set", 8), folder)


def test_no_rank_learns_from_it_and_the_next_starts_resume(
    case: Case, ground: Ground, tmp_path: Path
) -> None:
    fault = case.arguments
    of_ranks = trained(ground, tmp_path / "run", fault)
    with_fault, *next_starts = zip(*of_ranks)

    assert_same_decisions(with_fault)
    assert_skipped_steps_change_nothing(with_fault)
    assert_ended_as_it_should(fault, with_fault[0])
    for number, seen in enumerate(next_starts):
        assert {one.outcome for one in seen} == {"finished"}, seen
        assert_same_decisions(seen)
        assert all(seen[0].decisions.values()), f"start {number} skips steps: {seen[0]}"
    assert_good_to_the_end(ground, fault, tmp_path / "run")


def trained(ground: Ground, outputs: Path, fault: Fault) -> list[list[Seen]]:
    """What each rank saw of the run and of the next two starts."""
    options = fault.config_options()
    return run_ranks(fault.world_size, starts, ground.config, outputs, fault, options)


def assert_same_decisions(of_ranks: tuple[Seen, ...]) -> None:
    first = of_ranks[0]
    for rank, seen in enumerate(of_ranks):
        assert seen.decisions == first.decisions, f"rank {rank} decides otherwise: {of_ranks}"
        assert seen.outcome == first.outcome, f"rank {rank} ends otherwise: {of_ranks}"


def assert_skipped_steps_change_nothing(of_ranks: tuple[Seen, ...]) -> None:
    for rank, seen in enumerate(of_ranks):
        for step, was_taken in seen.decisions.items():
            assert seen.changed[step] == was_taken, f"step {step} changed bytes of rank {rank}"


def assert_ended_as_it_should(fault: Fault, seen: Seen) -> None:
    """The steps that were skipped, and the message with a checkpoint that is good."""
    skipped = [step for step, was_taken in seen.decisions.items() if not was_taken]
    if fault.place in PASSING:
        last = FIRST + MAX_BAD_STEPS - 1
        assert skipped == [step for step in fault.steps if step <= last or not fault.ends_the_run]
    if not fault.ends_the_run:
        assert seen.outcome == "finished", seen
        return

    in_a_row = f"got no finite loss and gradient in {MAX_BAD_STEPS} steps in a row, up to step "
    assert in_a_row in seen.outcome or (
        "got NaN or infinity in " in seen.outcome and f" (rank {fault.rank})" in seen.outcome
    ), seen.outcome
    assert "resume from the last good checkpoint with --resume auto" in seen.outcome, seen
    # What was saved before the fault is not rotated away.
    assert any(int(path.name.removeprefix("step_")) < FIRST for path in seen.kept), seen


def good_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the newest last; raises unless each is whole and finite."""
    checkpoints = committed_checkpoints(run_dir)
    for checkpoint in checkpoints:
        verify(checkpoint)
        for name in TENSORS:
            for key, tensor in load_file(checkpoint / name).items():
                if not tensor.isfinite().all():
                    raise ValueError(f"got NaN or infinity in {key} of {checkpoint}")
    return checkpoints


def assert_good_to_the_end(ground: Ground, fault: Fault, run_dir: Path) -> None:
    """All checkpoints are finite; the bits are those of a run without a fault if none was lost."""
    last = good_checkpoints(run_dir)[-1]
    assert last.name == f"step_{STEPS + 1:08d}"
    state = json.loads((last / "state.json").read_text())

    if state["skipped_steps"] == 0:
        assert digests(last) == digests(ground.whole(fault) / last.name)
    if not fault.ends_the_run:
        assert state["skipped_steps"] == len(fault.steps)


def digests(checkpoint: Path) -> list[str]:
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return [files[name]["sha256"] for name in TENSORS]
