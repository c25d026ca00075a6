"""When a step of ``accumulation_steps`` micro-batches reduces gradients and averages weights.

``test_exact_training.py`` compares such steps with one process.
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
    OF_EACH_STEP,
    relative_error,
    train_exactly,
)
from ranks import run_ranks
from runs import write_training
from safetensors.torch import load_file

from opensora_sp.config import load_train_config
from opensora_sp.features.build import micro_batches_of_step
from opensora_sp.parallel.communication import listening
from opensora_sp.training import trainer
from opensora_sp.training.step import TrainingStep

STEPS = 2
OPTIONS = [
    "micro_batches_per_step=None",
    f"max_steps={STEPS}",
    *OF_EACH_STEP,
    "batch_size=3",  # on two ranks: whole samples would leave nothing to exchange
    "grad_checkpoint=False",
]


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
