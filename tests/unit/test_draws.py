"""What is drawn about a micro-batch: the same numbers in any process, and by which one."""

from __future__ import annotations

import os
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opensora_sp.data.dataset import ClipShape
from opensora_sp.data.loader import StepLoader
from opensora_sp.data.randomness import normal, uniform
from opensora_sp.data.sampler import MicroBatch, MicroBatchPlan, ReadRequest, ReplicaBatches
from opensora_sp.features import batch as module
from opensora_sp.features.batch import DrawConfig, Draws

SHAPE, LATENT_SIZE = ClipShape(7, 28, 20), (7, 7, 5)
MODEL = SimpleNamespace(class_dropout_prob=0.4, drop_path=0.3, depth=3, patch_size=(2, 2, 2))
TRAINING = SimpleNamespace(
    seed=7, mask_ratios={"random": 0.5, "image_head": 0.3}, mask_types=None, scheduler={}
)
RULES = DrawConfig.of_training(TRAINING, MODEL, channels=3)


def test_the_numbers_are_those_of_former_versions() -> None:
    """A run that resumes from their checkpoints continues as it would have."""
    ids = (5, 2, 9, 0)
    draws = RULES.draw_micro_batch(MicroBatch(11, 0, SHAPE, ids, 1.0), LATENT_SIZE)
    assert draws.ids.tolist() == list(ids) and draws.noise.shape == (4, 3, *LATENT_SIZE)

    first = [-0.961139440536499, -0.846394419670105, -0.6671736240386963]
    assert draws.noise.flatten()[:3].tolist() == first
    times = [0.9493856430053711, 0.8182971477508545, 0.5430797934532166, 0.7774180769920349]
    assert draws.timesteps.tolist() == [times]
    assert draws.drop_caption == (True, False, True, False)
    masks = ["0011111", "0011110", "1100000", "1111001"]
    assert ["".join(str(int(one)) for one in row) for row in draws.frame_mask] == masks
    branches = ["0000", "0000", "0000", "0000", "1010", "0000"]
    assert ["".join(map(str, row)) for row in draws.drop_path.int().tolist()] == branches


def test_validation_draws_a_timestep_in_each_bin() -> None:
    rules = DrawConfig(seed=7, channels=3, purpose="validation_", bins=4)
    draws = rules.draw([(5,), (0,)], LATENT_SIZE)

    size = (3, *LATENT_SIZE)
    noise = torch.stack([normal(size, 7, "validation_noise", clip) for clip in (5, 0)])
    assert torch.equal(draws.noise, noise)
    for k, row in enumerate(draws.timesteps):
        drawn = [uniform(7, "validation_timestep", clip, k) for clip in (5, 0)]
        assert torch.equal(row, torch.tensor([(k + number) / 4 for number in drawn]))
    assert draws.timesteps.shape == (4, 2)
    assert draws.frame_mask is draws.drop_caption is draws.drop_path is None


class Nothing:
    """A dataset whose items are not of interest."""

    def __getitem__(self, sample: Any) -> int:
        return os.getpid()


def equal(left: Draws, right: Draws) -> bool:
    pairs = [(getattr(left, field.name), getattr(right, field.name)) for field in fields(Draws)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_workers_draw_and_the_main_process_does_not(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three micro-batches on two replicas, one of which is idle in the second round."""
    plan = MicroBatchPlan(
        num_samples=9, batch_size=2, micro_batches_per_step=3, seed=5, shape=SHAPE
    )
    expected = {}
    for micro_batch in plan.step(0) + plan.step(1):
        expected[micro_batch.number] = RULES.draw_micro_batch(micro_batch, LATENT_SIZE)
    idle = RULES.draw([(0, 0)], LATENT_SIZE)

    # A worker appends to its own copy of this list.
    drawn_here = []
    monkeypatch.setattr(module, "normal", lambda *args: drawn_here.append(args) or normal(*args))
    found = []
    for replica in range(2):
        batches = ReplicaBatches(
            plan,
            start=0,
            stop=2,
            replica=replica,
            num_replicas=2,
            request_of=lambda one, group: ReadRequest(one, one.samples, LATENT_SIZE),
        )
        loader = StepLoader(
            Nothing(), batches, num_workers=num_workers, seed=0, draw=RULES.draw_micro_batch
        )
        for step in loader:
            found += step.loaded

    assert bool(drawn_here) == (num_workers == 0)
    assert {one.micro_batch.number for one in found if one.micro_batch.ids} == set(range(6))
    for one in found:
        wanted = expected[one.micro_batch.number] if one.micro_batch.ids else idle
        assert equal(one.draws, wanted)
        assert all((pid == os.getpid()) == (num_workers == 0) for pid in one.items)
