"""When a step of ``accumulation_steps`` micro-batches reduces gradients and averages weights.

``test_exact_training.py`` compares such steps with one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
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
from opensora_sp.plugin import SequenceParallelPlugin

STEPS = 2
OPTIONS = [
    "micro_batches_per_step=None",
    f"max_steps={STEPS}",
    *OF_EACH_STEP,
    "batch_size=3",  # on two ranks: whole samples would leave nothing to exchange
    "grad_checkpoint=False",
]


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
