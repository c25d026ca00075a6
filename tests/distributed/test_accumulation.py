"""A step of ``accumulation_steps`` micro-batches is one of the joined batch, in float64.

One process trains the bare model on the joined batch with torch's own optimizer. Losses, weights
and EMA weights are compared after each step. ``test_exact_training.py`` has micro-batches of
several sizes, with which no batch can be joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import world_runs
from exact_runs import (
    DECAY,
    LR,
    MOMENTUM,
    OF_EACH_STEP,
    exact_model,
    relative_error,
    train_exactly,
)
from ranks import run_ranks
from runs import batch_of, features_of, losses, write_training
from safetensors.torch import load_file
from torch import nn
from world_runs import digests

from opensora_sp.common.files import read_json
from opensora_sp.config import TrainConfig, build_component, load_train_config
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.data import MicroBatch
from opensora_sp.features.build import make_dataset, make_plan, make_source, micro_batches_of_step
from opensora_sp.parallel.communication import listening
from opensora_sp.plugin import SequenceParallelPlugin
from opensora_sp.training import trainer
from opensora_sp.training.preflight import check_resume
from opensora_sp.training.step import TrainingStep

STEPS, MAX_NORM = 2, 0.05
OPTIONS = [
    "micro_batches_per_step=None",
    f"max_steps={STEPS}",
    *OF_EACH_STEP,
    "batch_size=3",  # on two ranks: whole samples would leave nothing to exchange
    "grad_checkpoint=False",
]
# Ranks, what is set, and micro-batches of a step.
RUNS: dict[str, tuple[int, list[str], int]] = {
    "shared": (2, ["sp_size=2", "accumulation_steps=3", "grad_clip=0"], 3),
    "clipped": (2, ["sp_size=1", "accumulation_steps=2", f"grad_clip={MAX_NORM}"], 4),
    "both": (4, ["sp_size=2", "accumulation_steps=2", "zero_stage=1", "grad_clip=0"], 4),
    "both, clipped": (
        4,
        ["sp_size=2", "accumulation_steps=2", "zero_stage=1", f"grad_clip={MAX_NORM}"],
        4,
    ),
}


def joined(cfg: TrainConfig, model: Any, micro_batches: list[MicroBatch], source: Any) -> Any:
    """The losses of all clips of a step ``[B]``, from one call of the model."""
    dataset, batches = make_dataset(cfg), []
    for one in micro_batches:
        features = features_of(source, [dataset[sample] for sample in one.samples])
        batches.append(batch_of(cfg, model.config, features, one.number, one.ids))

    inputs = {}
    for name, value in batches[0].inputs.items():
        if value is not None:
            axis = 1 if name == "drop_path" else 0
            inputs[name] = torch.cat([batch.inputs[name] for batch in batches], dim=axis)
    predicted = model(torch.cat([batch.x_t for batch in batches]), **inputs)

    flow, sizes = build_component(cfg.scheduler, SCHEDULERS), [len(one.x_t) for one in batches]
    parts = zip(predicted.split(sizes), batches, strict=True)
    return torch.cat([flow.losses(part, batch.noised) for part, batch in parts])


def one_process(cfg: TrainConfig, per_step: int) -> Iterator[tuple[float, dict, dict]]:
    """After each step its loss, the weights and the EMA weights."""
    model, dataset = exact_model(None, cfg), make_dataset(cfg)
    source, plan = make_source(cfg, dataset, torch.device("cpu")), make_plan(cfg, dataset, per_step)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    average = {name: one.detach().clone() for name, one in model.named_parameters()}
    for step in range(STEPS):
        loss = joined(cfg, model, plan.step(step), source).mean()
        loss.backward()
        if cfg.grad_clip:
            assert nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > 2 * MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
        for name, weight in model.named_parameters():
            average[name].lerp_(weight.detach(), 1 - DECAY)
        yield loss.item(), dict(model.state_dict()), average


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs, and one more that stops after a step and resumes."""
    folder = tmp_path_factory.mktemp("accumulation")
    config = write_training(folder, 9)
    runs = [
        (ranks, [*OPTIONS, *own, f"outputs={folder / name}"], None)
        for name, (ranks, own, _) in RUNS.items()
    ]
    ranks, own, _ = RUNS["clipped"]
    parts = [*OPTIONS, *own, f"outputs={folder / 'parts'}"]
    runs += [(ranks, [*parts, "max_steps=1"], None), (ranks, parts, "auto")]
    run_ranks(4, train_exactly, config, runs)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_step_is_that_of_the_joined_batch(name: str, folder: Path) -> None:
    _, own, per_step = RUNS[name]
    switches = read_json(folder / name / "summary.json")["switches"]
    assert bool(switches) == ("sp_size=2" in own)

    cfg, found = load_train_config(folder / "config.py", [*OPTIONS, *own]), losses(folder / name)
    for step, (loss, *states) in enumerate(one_process(cfg, per_step)):
        # Loss and norm are numbers in float32.
        assert found[step] == pytest.approx(loss, rel=1e-6)
        bound = 1e-7 if cfg.grad_clip else 1e-12
        saved = folder / name / f"step_{step + 1:08d}"
        for part, wanted in zip(("model", "ema"), states, strict=True):
            theirs = load_file(saved / part / "model.safetensors")
            assert theirs.keys() >= states[1].keys()
            for key in theirs.keys() & wanted.keys():
                assert relative_error(theirs[key], wanted[key]) < bound, (part, key)


@pytest.mark.slow
def test_a_run_resumes_between_steps(folder: Path) -> None:
    assert digests(folder / "parts", STEPS) == digests(folder / "clipped", STEPS)
    state = read_json(folder / "clipped" / "step_00000001" / "state.json")
    assert state["micro_batches_per_step"] == state["next_micro_batch"] == 4


@pytest.mark.slow
def test_another_number_is_refused_on_resume(folder: Path) -> None:
    config, checkpoint = folder / "config.py", folder / "both" / "step_00000002"
    _, own, _ = RUNS["both"]
    cfg = load_train_config(config, [*OPTIONS, *own])
    check_resume(cfg, checkpoint, make_dataset(cfg))

    other = load_train_config(config, [*OPTIONS, *own, "accumulation_steps=4"])
    with pytest.raises(ValueError, match=r"got accumulation_steps 4 \(there 2\) to resume from"):
        check_resume(other, checkpoint, make_dataset(other))


def passes_and_reductions(config: Path, runs: list[tuple[int, list[str], None]]) -> list[str]:
    """What this rank does in the steps of some runs, in order."""
    done: list[str] = []

    @contextmanager
    def heard(kind: str, backward: bool, device: torch.device) -> Iterator[None]:
        if kind == "zero" and backward:
            done.append("reduction")
        yield

    class Recorded(TrainingStep):
        def _forward_backward(self, *args: Any) -> torch.Tensor:
            done.append("pass")
            return super()._forward_backward(*args)

        def _update(self, *args: Any) -> Any:
            done.append("update")
            return super()._update(*args)

    with listening(heard), mock.patch.object(trainer, "TrainingStep", Recorded):
        world_runs.train_in_worlds(config, runs)
    return done


@pytest.mark.slow
def test_gradients_are_reduced_once_a_step(config: Path, tmp_path: Path) -> None:
    """Not after each micro-batch, as ColossalAI does where the same number is set as a step's."""
    ways = {
        "accumulation_steps=3": [*["pass"] * 3, "update", "reduction"],
        "micro_batches_per_step=3": [*["pass", "reduction"] * 3, "update"],
    }
    runs, wanted = [], list[str]()
    for stage, (option, of_step) in product((1, 2), ways.items()):
        own = [option, f"zero_stage={stage}", f"outputs={tmp_path / f'{len(runs)}'}"]
        runs.append((2, [*OPTIONS, "sp_size=2", f"ckpt_every={STEPS}", *own], None))
        wanted += of_step * STEPS
    assert run_ranks(2, passes_and_reductions, config, runs) == [wanted] * 2


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training(tmp_path_factory.mktemp("config"), 4)


def test_the_number_of_micro_batches_is_kept_by_a_run(config: Path) -> None:
    """On other processes a step stays the same."""
    for own, replicas in (("sp_size=2", 2), ("sp_size=1", 4), ("sp_size=auto", 4)):
        cfg = load_train_config(config, [*OPTIONS, own, "accumulation_steps=3"])
        assert micro_batches_of_step(cfg, {}, 4) == 3 * replicas == cfg.micro_batches(replicas)
        assert micro_batches_of_step(cfg, {"micro_batches_per_step": 6}, 4) == 6


def test_ema_weights_are_averaged_once_a_step(config: Path, tmp_path: Path) -> None:
    """Not after each micro-batch."""
    options = [*OPTIONS, "sp_size=1", "accumulation_steps=2", f"outputs={tmp_path / 'run'}"]
    run_ranks(1, train_exactly, config, [(1, options, None)])

    first, second = tmp_path / "run" / "step_00000001", tmp_path / "run" / "step_00000002"
    weights, ema_before, ema = (
        load_file(folder / "model.safetensors")
        for folder in (second / "model", first / "ema", second / "ema")
    )
    assert ema.keys() == ema_before.keys()
    for name, average in ema.items():
        expected = DECAY * ema_before[name] + (1 - DECAY) * weights[name]
        assert relative_error(average, expected) < 1e-12, name


def test_bad_numbers_are_refused(config: Path) -> None:
    for options, message in {
        ("accumulation_steps=0",): "got accumulation_steps = 0",
        ("accumulation_steps=1.5",): "got accumulation_steps = 1.5",
        (
            "accumulation_steps=2",
            "micro_batches_per_step=4",
        ): "got micro_batches_per_step 4 and accumulation_steps 2; expected one of them",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_train_config(config, [*OPTIONS, *options])


def plugin_of(config: Path) -> str:
    cfg = load_train_config(config, [*OPTIONS, "accumulation_steps=2", "sp_size=1"])
    assert SequenceParallelPlugin.from_config(cfg).accumulate_locally
    plain = cfg.model_copy(update={"accumulation_steps": 1})
    return str(SequenceParallelPlugin.from_config(plain).accumulate_locally)


def test_the_plugin_sums_locally_above_one_micro_batch(config: Path) -> None:
    assert run_ranks(1, plugin_of, config) == ["False"]
