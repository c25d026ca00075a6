"""Trainings with faults at chosen moments, compared with an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from jobs import ElasticJob, Job
from planted_faults import Fault
from ranks import run_ranks
from runs import write_training
from safetensors.torch import load_file

from opensora_sp.checkpoint.paths import checkpoint_name
from opensora_sp.config import load_train_config

TENSORS = ("model/model.safetensors", "ema/model.safetensors", "optimizer.safetensors")


def write_disturbed_training(folder: Path) -> Path:
    """The config of a training on 14 clips that saves and validates every second step."""
    config = write_training(folder, 14)
    validation = dict(every=2, manifest=str(folder / "clips.csv"), bins=1)
    options = dict(
        validation=validation,
        grad_checkpoint=False,
        ckpt_every=2,
        keep_last=3,
        num_frames=3,
        image_size=(16, 16),
        grace_time=60,
    )
    lines = [f"{name} = {value!r}" for name, value in options.items()]
    config.write_text("\n".join([config.read_text(), *lines, ""]))
    return config


def start(
    jobs: list[Job], folder: Path, config: Path, *options: str, faults: dict[int, Fault], **how: Any
) -> Job:
    """A job of the fixture ``jobs``; under a launcher, or forked from the warm process."""
    kind = Job if "launcher" in how else ElasticJob
    jobs.append(kind(folder, config, *options, faults=faults, **how))
    return jobs[-1]


def steps_of(job: Job) -> list[dict[str, Any]]:
    """A line for each step that rank 0 has queued, in all attempts."""
    path = job.pids / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_undisturbed(config: Path, options: list[str]) -> None:
    from opensora_sp.training import metrics
    from opensora_sp.training.run import train

    metrics.draw_loss = lambda run_dir: None
    train(load_train_config(config, ["validation=None", *options]))


class UndisturbedRuns(dict[tuple[str, ...], Path]):
    """Folders of runs that nobody disturbs, by their options; each is made when it is asked for."""

    def __init__(self, config: Path, root: Path) -> None:
        self.config, self.root = config, root

    def __missing__(self, options: tuple[str, ...]) -> Path:
        self[options] = outputs = self.root / f"undisturbed {len(self)}"
        run_ranks(2, train_undisturbed, self.config, [f"outputs={outputs}", *options])
        return outputs


def assert_same_bits(found: Path, wanted: Path, step: int) -> None:
    """Two runs have the same checkpoint of a step: weights, EMA weights, moments, and state."""
    differ = []
    for name in TENSORS:
        one, other = (load_file(run / checkpoint_name(step) / name) for run in (found, wanted))
        assert set(one) == set(other), f"{name} has other tensors after step {step}"
        differ += [f"{name}: {key}" for key in one if not same_bits(one[key], other[key])]

    states = [
        json.loads((run / checkpoint_name(step) / "state.json").read_text())
        for run in (found, wanted)
    ]
    for state in states:
        del state["config"]
    differ += [key for key in states[0] if states[0][key] != states[1].get(key)]
    assert not differ, f"{len(differ)} differ after step {step}: {differ[:5]}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    views = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*views)
