"""The trainer with a degree for each micro-batch and mixed steps equals one process, in float64.

Every step is compared: its loss, all weights after SGD with momentum, and the EMA weights. One
process trains the bare model with torch's own optimizer, without sampler, schedule and plugin.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from exact_runs import (
    DECAY,
    LR,
    MOMENTUM,
    OF_EACH_STEP,
    exact_model,
    relative_error,
    train_exactly,
)
from mixed_clips import BUCKETS, TRAIN, write_mixed_set
from ranks import run_ranks
from runs import batch_of, features_of, losses
from safetensors.torch import load_file
from torch import nn

from opensora_sp.config import TrainConfig, build_component, load_train_config
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.features.build import make_dataset, make_plan, make_source
from opensora_sp.features.corrupt_samples import CorruptSamples
from opensora_sp.features.sharded import ShardedEncoder
from opensora_sp.parallel import SequenceMesh
from opensora_sp.parallel.cost_model import CPU
from opensora_sp.parallel.rank_groups import RankGroup
from opensora_sp.runtime.cost_models import write_cost_model

STEPS, PER_STEP, MAX_NORM = 3, 4, 0.05
# Links cost nothing and launches little, so that "auto" shares micro-batches among CPUs as well.
FREE_LINKS = replace(
    CPU, bandwidth=1e12, latency=0.0, network_bandwidth=1e12, network_latency=0.0, launch=1e-6
)
MIXED = [
    "batch_order=mixed",
    f"micro_batches_per_step={PER_STEP}",
    f"max_steps={STEPS}",
    *OF_EACH_STEP,
    "lr_schedule=constant",
    "grad_clip=0",
]

# As many micro-batches of a step on two ranks, of nearly one cost.
ACCUMULATED = ["batch_order=by_cost", "micro_batches_per_step=None", "accumulation_steps=2"]
ACCUMULATED += ["loss_weight=micro_batch", f"grad_clip={MAX_NORM}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on three and two ranks, at ZeRO 2 and 1, and with both weights of losses; and one that
    accumulates a fixed number of micro-batches and clips.
    """
    folder = tmp_path_factory.mktemp("exact")
    manifest = write_mixed_set(folder, broken=())
    (folder / "config.py").write_text(
        TRAIN.format(buckets=BUCKETS, manifest=str(manifest), steps=STEPS)
    )
    facts: dict[str, Any] = dict(device="CPU", versions={}, date="")
    write_cost_model(folder / "links.json", FREE_LINKS, facts)

    auto = [*MIXED, "sp_size=auto", f"cost_model={folder / 'links.json'}"]
    accumulated = [*MIXED, *ACCUMULATED]
    runs: list[tuple[int, list[str], str | None]] = [
        (3, [*auto, f"outputs={folder / 'three'}"], None),
        (2, [*auto, "zero_stage=1", "loss_weight=micro_batch", f"outputs={folder / 'two'}"], None),
        (2, [*accumulated, f"outputs={folder / 'accumulated'}"], None),
    ]
    degrees = set().union(*run_ranks(3, train_and_see_degrees, folder / "config.py", runs))
    (folder / "degrees.json").write_text(json.dumps(sorted(degrees)))
    return folder


def train_and_see_degrees(config: Path, runs: list[tuple[int, list[str], str | None]]) -> set[int]:
    """The sizes of the groups that compute micro-batches."""
    degrees, using = set[int](), SequenceMesh.using

    def watched(mesh: SequenceMesh, group: RankGroup) -> Any:
        degrees.add(group.size)
        return using(mesh, group)

    with mock.patch.object(SequenceMesh, "using", watched):
        train_exactly(config, runs)
    return degrees


def one_process(cfg: TrainConfig) -> Iterator[tuple[float, dict[str, Any], dict[str, Any]]]:
    """After each step its loss, the weights, and the EMA weights, by plain torch."""
    model, cpu = exact_model(None, cfg), torch.device("cpu")
    dataset = make_dataset(cfg)
    source, mesh = make_source(cfg, dataset, cpu), SequenceMesh(1)
    plan = make_plan(cfg, dataset, PER_STEP)
    flow = build_component(cfg.scheduler, SCHEDULERS)
    corrupt = CorruptSamples(dataset.rows, mesh, 0.0)
    encoder = ShardedEncoder(mesh, model, dataset, plan, source, corrupt, cpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    average = {name: one.detach().clone() for name, one in model.named_parameters()}

    for step in range(STEPS):
        micro_batches, total = plan.step(step), 0.0
        clips = sum(len(one.ids) for one in micro_batches)
        for one in micro_batches:
            items = [dataset[sample] for sample in encoder.samples(one)]
            batch = batch_of(cfg, model.config, features_of(source, items), one.number, one.ids)
            loss = flow.losses(model(batch.x_t, **batch.inputs), batch.noised)
            share = loss.sum() / clips
            if cfg.loss_weight == "micro_batch":
                share = loss.mean() / len(micro_batches)
            share.backward()
            total += share.item()

        if cfg.grad_clip:
            assert nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > 2 * MAX_NORM
        optimizer.step()
        optimizer.zero_grad()
        for name, weight in model.named_parameters():
            average[name] = DECAY * average[name] + (1 - DECAY) * weight.detach()
        yield total, dict(model.state_dict()), average


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("three", []),
        ("two", ["loss_weight=micro_batch"]),
        ("accumulated", ACCUMULATED),
    ],
)
def test_whole_steps_equal_one_process(folder: Path, name: str, own: list[str]) -> None:
    cfg = load_train_config(folder / "config.py", [*MIXED, *own])
    found = losses(folder / name)
    assert len(found) == STEPS

    start = exact_model(None, cfg)
    for number, (loss, weights, average) in enumerate(one_process(cfg)):
        # The loss is summed up in float32.
        assert found[number] == pytest.approx(loss, rel=1e-6)
        bound = 1e-7 if cfg.grad_clip else 1e-9  # the norm is summed up in float32
        saved = folder / name / f"step_{number + 1:08d}"
        for part, wanted in (("model", weights), ("ema", average)):
            theirs = load_file(saved / part / "model.safetensors")
            assert set(theirs) >= set(average)
            assert max(relative_error(theirs[key], wanted[key]) for key in wanted) < bound
    trained = [name for name, one in start.named_parameters() if one.requires_grad]
    assert not any(torch.equal(start.get_parameter(name), weights[name]) for name in trained)


@pytest.mark.slow
def test_these_steps_take_groups_of_several_sizes(folder: Path) -> None:
    """Otherwise the comparison would be of less."""
    assert json.loads((folder / "degrees.json").read_text()) == [1, 2, 3]

    state = json.loads((folder / "three" / f"step_{STEPS:08d}" / "state.json").read_text())
    assert state["batch_order"] == "mixed"
