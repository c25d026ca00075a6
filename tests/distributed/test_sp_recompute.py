"""Selective gradient checkpointing with sequence parallelism, in float64 against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from parity_cases import DEPTH, FULL, Case, assert_one_process_result
from ranks import run_ranks
from runs import TRAIN, write_toy_set
from worlds import TRAINING, in_worlds

from opensora_sp.config import load_train_config
from opensora_sp.models.recompute import EVERYTHING
from opensora_sp.parallel import SequenceMesh
from opensora_sp.training.metrics import read_metrics

pytestmark = pytest.mark.core
CLIP = Case((1, 7, 5, 9))  # at least two frames on each rank
IMAGE = Case((1, 1, 4, 3))  # heads are exchanged inside of blocks
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(overlap_chunks=2, overlap_backward=True),
    dict(strategy="ulysses"),
    dict(strategy="split_gather"),
]
SWITCHES = 2 * DEPTH - 1
LEVELS = [(1, 2, 3, 4), (5, 6, -1, -1)]  # of the four blocks; 0 and 7 are those of other tests


def compare() -> None:
    mesh = SequenceMesh(dist.get_world_size())
    for levels in LEVELS:
        for options in OPTIONS:
            counter = assert_one_process_result(replace(CLIP, checkpoint=levels), mesh, **options)
            if "strategy" not in options:
                chunks = options.get("overlap_chunks", 1)
                assert counter.calls["switch", "backward"] == SWITCHES * chunks

        counter = assert_one_process_result(replace(IMAGE, checkpoint=levels), mesh)
        assert counter.calls["heads", "backward"] == 2 * DEPTH
        # As many samples as the ranks do not divide.
        masked = replace(FULL, size=(5 - mesh.sp_size, 5, 5, 7), checkpoint=levels)
        counter = assert_one_process_result(masked, mesh)
        assert counter.calls["switch", "backward"] == SWITCHES


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parity(world: int) -> None:
    run_ranks(world, compare)


RUNS = {  # grad_checkpoint, and bytes of a device
    "plain": ("False", 80e9),
    "small": ("auto", 3.1e9),
    "large": ("auto", 80e9),
    "number": ("3", 80e9),
    "offload": ("offload", 80e9),
}


def train_within(config: Path, name: str) -> tuple[list[float], Any]:
    """Losses of a run, and what was set at its end."""
    from opensora_sp.models.stdit3 import STDiT3
    from opensora_sp.training import memory_fit, metrics
    from opensora_sp.training.run import train

    setting, memory = RUNS[name]
    chosen: list[Any] = []
    set_grad_checkpoint = STDiT3.set_grad_checkpoint

    def noted(model: STDiT3, setting: Any = True) -> None:
        chosen.append(setting)
        set_grad_checkpoint(model, setting)

    metrics.draw_loss = lambda run_dir: None
    # The smallest device of all counts.
    memory_fit.memory_of = lambda device: memory + dist.get_rank() * 80e9
    STDiT3.set_grad_checkpoint = noted
    outputs = config.parent / name
    options = [f"outputs={outputs}", f"grad_checkpoint={setting}", "max_steps=2", "ckpt_every=2"]
    try:
        train(load_train_config(config, options))
    finally:
        STDiT3.set_grad_checkpoint = set_grad_checkpoint
    return [line["loss"] for line in read_metrics(outputs)], chosen[-1]


def train_all(config: Path) -> dict[str, tuple[list[float], Any]]:
    found = in_worlds(train_within, [(2, (config, name)) for name in RUNS], TRAINING)
    return dict(zip(RUNS, found, strict=True))


@pytest.mark.slow
def test_training_keeps_what_fits(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    manifest = write_toy_set(tmp_path / "set", 4)
    config.write_text(TRAIN.format(manifest=str(manifest)))

    for of_rank in run_ranks(2, train_all, config):
        settings = {name: setting for name, (_, setting) in of_rank.items()}
        assert settings == {
            "plain": False,
            "small": [0] * 4,
            "large": [EVERYTHING] * 4,
            "number": 3,
            "offload": "offload",
        }
        losses = [losses for losses, _ in of_rank.values()]
        assert len(losses[0]) == 2
        assert all(one == losses[0] for one in losses)
