"""Elementwise optimizers by name: under ZeRO as on one process, resumed bit by bit, and counted."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from opensora_sp.config.optimizer_options import STATES, Optimizer
from opensora_sp.planner.memory import ModelSizes, Persistent, Zero
from opensora_sp.training.trainable import make_optimizer

STEPS, MAX_NORM = 4, 3.0
CASES: dict[str, dict[str, Any]] = {
    "AdamW": dict(weight_decay=0.1, amsgrad=True),
    "Adam": dict(betas=(0.8, 0.9), weight_decay=0.1),
    "Adamax": {},
    "NAdam": dict(weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": dict(betas=(0.5, 0.7)),
    "SGD": dict(momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD without momentum": dict(),
    "RMSprop": dict(momentum=0.9, centered=True),
    "Adagrad": dict(lr_decay=0.1, initial_accumulator_value=0.5, weight_decay=0.1),
    "Adadelta": dict(weight_decay=0.1),
}
SHAPES = [(7, 5), (3,), (4, 4, 2), (1,), (40, 9)]


def settings(case: str) -> Optimizer:
    return Optimizer(type=case.partition(" ")[0], lr=0.05, **CASES[case])


class Parameters(nn.ParameterDict):
    """Parameters of odd sizes, whose gradients a caller chooses."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
        super().__init__({str(i): nn.Parameter(x) for i, x in enumerate(drawn)})

    def loss(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self[name] * g).sum() for name, g in gradients.items()]).sum()


def gradients_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {str(i): torch.randn(shape, generator=generator) for i, shape in enumerate(SHAPES)}


def torch_optimizer(module: nn.Module, case: str) -> torch.optim.Optimizer:
    chosen = settings(case)
    cls: Any = getattr(torch.optim, chosen.type)
    return cls(module.parameters(), **chosen.options)


def one_process(case: str) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """The weights after all steps, and the optimizer."""
    module = Parameters()
    optimizer = torch_optimizer(module, case)
    for step in range(STEPS):
        module.loss(gradients_of(step)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in module.items()}, optimizer


class Run:
    """A boosted module, its optimizer and its booster."""

    def __init__(self, case: str, stage: int, precision: str) -> None:
        from opensora_sp.plugin import SequenceParallelPlugin
        from opensora_sp.plugin._colossalai import Booster

        self.booster = Booster(plugin=SequenceParallelPlugin(1, stage, precision, MAX_NORM))
        self.module = Parameters()
        optimizer = torch_optimizer(self.module, case)
        self.model, self.optimizer, *_ = self.booster.boost(self.module, optimizer)

    def train(self, first: int, stop: int) -> None:
        """Steps whose gradients differ from rank to rank, and are those of ``one_process``."""
        rank, world = dist.get_rank(), dist.get_world_size()
        share = 2 * (rank + 1) / (world + 1)
        for step in range(first, stop):
            gradients = {name: share * g for name, g in gradients_of(step).items()}
            loss = self.module.loss(gradients)
            self.optimizer.backward(loss)
            assert self.optimizer.step_if_finite(loss)

    def everything(self) -> dict[str, Tensor]:
        """Whole tensors: the numbers that ZeRO pads shards with are nobody's."""
        shards = self.optimizer.shards
        found = {name: p.detach() for name, p in self.module.items()}
        for name, master in shards.master_weights.items():
            found[f"master/{name}"] = shards.whole(name, master)
            for kind, value in shards.states()[name].items():
                if value is not None:
                    is_shard = isinstance(value, Tensor) and value.ndim
                    found[f"{kind}/{name}"] = (
                        shards.whole(name, value) if is_shard else torch.as_tensor(value)
                    )
        return found

    def save(self, folder: Path) -> None:
        self.booster.save_model(self.model, str(folder / "model"), shard=True)
        self.booster.save_optimizer(self.optimizer, str(folder / "optimizer"), shard=True)

    def load(self, folder: Path) -> None:
        self.booster.load_model(self.model, str(folder / "model"))
        self.booster.load_optimizer(self.optimizer, str(folder / "optimizer"))


def agrees_with_one_process(case: str, stage: int) -> None:
    run = Run(case, stage, "fp32")
    run.train(0, STEPS)
    assert predicted_bytes(case, stage) == state_bytes(run)

    expected, _ = one_process(case)
    for name, weights in expected.items():
        found = run.module[name].detach()
        torch.testing.assert_close(
            found, weights, rtol=2e-5, atol=2e-6, msg=lambda text: f"{case}, {stage}: {text}"
        )


def predicted_bytes(case: str, stage: int) -> int:
    """The planner's bytes of moments and scalars on one rank."""
    sizes = ModelSizes(final=(), pairs=(), rest=tuple(map(math.prod, SHAPES)), frozen=0)
    zero = Zero(dist.get_world_size(), stage, element_size=4)
    moments, scalars = settings(case).moments, settings(case).scalars
    kept = Persistent.training(sizes, zero, moments=len(moments), scalars=len(scalars))
    return kept.moments


def state_bytes(run: Run) -> int:
    total = 0
    for state in run.optimizer.shards.states().values():
        for value in state.values():
            if value is not None:
                total += value.numel() * value.element_size()
    return total


def resumes_bit_by_bit(case: str, stage: int, precision: str, folder: Path) -> None:
    folder = folder / f"{case}-{stage}-{precision}-{dist.get_world_size()}"
    through = Run(case, stage, precision)
    through.train(0, 2)
    through.save(folder)
    through.train(2, STEPS)

    resumed = Run(case, stage, precision)
    resumed.load(folder)
    resumed.train(2, STEPS)
    expected, found = through.everything(), resumed.everything()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), (case, stage, name)


def all_stages(cases: list[str], folder: Path) -> None:
    for case in cases:
        for stage, precision in ((1, "fp32"), (2, "bf16")):
            agrees_with_one_process(case, stage)
            resumes_bit_by_bit(case, stage, precision, folder)


# A moment without scalars, scalars of its own, and a state before the first step.
SAMPLE = ["SGD", "NAdam", "Adagrad"]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAMPLE, id="some"),
        pytest.param([c for c in CASES if c not in SAMPLE], id="others", marks=pytest.mark.slow),
    ],
)
def test_optimizers_step_and_resume_under_zero(cases: list[str], tmp_path: Path) -> None:
    run_ranks(2, all_stages, cases, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_states_are_those_that_torch_keeps(case: str) -> None:
    _, optimizer = one_process(case)
    kept = {
        name
        for state in optimizer.state.values()
        for name, value in state.items()
        if value is not None
    }
    chosen = settings(case)
    assert kept == {*chosen.moments, *chosen.scalars}


@pytest.mark.parametrize("case", CASES)
def test_no_state_of_whole_weights_is_kept(case: str) -> None:
    """The plugin makes what a class begins with, of shards."""
    cfg = SimpleNamespace(optimizer=settings(case))
    optimizer = make_optimizer(cfg, list(Parameters().parameters()))  # type: ignore[arg-type]
    assert optimizer.param_groups and not optimizer.state


def test_every_optimizer_of_torch_is_a_case() -> None:
    assert {case.partition(" ")[0] for case in CASES} == set(STATES) - {"HybridAdam"}
