"""Optimizer steps whose micro-batches run on groups drawn at random from a nested family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from parity_cases import FULL, Case, make_inputs

from opensora_sp.diffusion import rank_loss, velocity_loss
from opensora_sp.parallel import SequenceMesh
from opensora_sp.parallel.rank_groups import RankGroup

BASE = replace(FULL, mask=False, x_mask=True)


@dataclass(frozen=True)
class Assigned:
    """A micro-batch of a step, and the group that computes it."""

    case: Case
    number: int
    group: RankGroup

    def inputs(self) -> dict[str, Any]:
        """Different ones for each number, also of one size."""
        inputs = make_inputs(self.case)
        scaled = inputs["x"].detach() * (1 + 0.1 * self.number)
        return inputs | {"x": scaled.requires_grad_()}

    def target(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.number)
        return torch.randn(self.inputs()["x"].shape, generator=generator, dtype=torch.float64)


def draw_step(family: tuple[RankGroup, ...], seed: int, output: str) -> list[Assigned]:
    """Micro-batches of 1 to 3 samples, on groups of any sizes, the largest groups first.

    One group at least has several ranks.
    """
    random = Random(seed)
    several = [group for group in family if group.size > 1]
    groups = [random.choice(several), *random.choices(family, k=3)]

    step = []
    for number, group in enumerate(groups):
        size = random.randint(1, 3), random.choice([1, 3, 4]), random.randint(2, 5), 4
        step.append(Assigned(replace(BASE, size=size, output=output), number, group))
    return sorted(step, key=lambda one: -one.group.size)


def run_step(
    model: torch.nn.Module,
    mesh: SequenceMesh,
    step: list[Assigned],
) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Forward and backward of this rank's micro-batches, each on its group.

    Returns:
        Of each of them, by number, the output, and this rank's gradients of x and y.
    """
    num_samples = sum(one.case.size[0] for one in step)
    found = {}
    for one in step:
        if mesh.rank not in one.group:
            continue
        with mesh.using(one.group):
            inputs = one.inputs()
            group_loss(model, mesh, one, inputs, num_samples).backward()
            with torch.no_grad():
                output = model(**one.inputs())
        found[one.number] = output, inputs["x"].grad, _gradient(inputs["y"])
    return found


def group_loss(
    model: torch.nn.Module,
    mesh: SequenceMesh,
    one: Assigned,
    inputs: dict[str, Any],
    num_samples: int,
) -> torch.Tensor:
    """This rank's loss, by the rule of docs/concepts/gradients.md."""
    target, x_mask = one.target(), inputs.get("x_mask")
    if one.case.output == "shards":
        losses = velocity_loss(model(**inputs, output="shards"), target, x_mask)
        return rank_loss(losses, global_samples=num_samples, world_size=mesh.world_size)

    mean = velocity_loss(model(**inputs), target, x_mask).mean()
    return mean * mesh.world_size * len(target) / (one.group.size * num_samples)


def one_process_step(
    model: torch.nn.Module, step: list[Assigned]
) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The same step of the bare model: the mean of all samples' losses."""
    num_samples = sum(one.case.size[0] for one in step)
    found = {}
    for one in step:
        inputs = one.inputs()
        output = model(**inputs)
        losses = velocity_loss(output, one.target(), inputs.get("x_mask"))
        (losses.sum() / num_samples).backward()
        found[one.number] = output.detach(), inputs["x"].grad, _gradient(inputs["y"])
    return found


def mean_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The mean over the world; a parameter without a gradient has zeros. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = _gradient(parameter).clone()
    together = torch.cat([gradient.flatten() for gradient in found.values()])
    dist.all_reduce(together)
    parts = (together / dist.get_world_size()).split([one.numel() for one in found.values()])
    return {name: part.view(found[name].shape) for name, part in zip(found, parts, strict=True)}


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
