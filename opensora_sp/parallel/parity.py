"""Parity: one step with sequence parallelism, compared with the same step of the bare model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .engine import ATTRIBUTE
from .mesh import SequenceMesh

logger = logging.getLogger(__name__)

OUTPUT = "the output"  # among names of parameters

# Largest relative difference that rounding explains.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}

# Relative to the largest gradient. Smaller ones, such as of a key bias, which is zero but for
# rounding, count as this large.
NOISE_FLOOR = 1e-3


@dataclass(frozen=True)
class Verdict:
    """Largest relative differences, ``max|ours - one process| / max|one process|``, the largest
    over the group.

    ``gradients`` maps parameter names to differences. ``all_zero`` names parameters whose gradient
    is zero in both steps, which shows nothing.
    """

    output: float
    gradients: dict[str, float]
    all_zero: tuple[str, ...]
    tolerance: float

    @property
    def worst(self) -> tuple[str, float]:
        differences = {OUTPUT: self.output, **self.gradients}
        # The largest, or one that is no number.
        name = max(differences, key=lambda n: (differences[n] != differences[n], differences[n]))
        return name, differences[name]

    @property
    def agrees(self) -> bool:
        # False for NaN.
        return self.worst[1] <= self.tolerance

    def __str__(self) -> str:
        name, difference = self.worst
        return (
            f"with and without sequence parallelism the output differs by {self.output:.1e}, "
            f"{len(self.gradients)} gradients by at most {difference:.1e} ({name}), relative; "
            f"{len(self.all_zero)} gradients are zero in both"
        )


def verify_step(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Verdict:
    """Run one forward and backward pass of a parallelized model on a whole batch, bare and
    parallel. Collective.

    Parameters keep their gradients, buffers and random generators their values. The model returns
    one tensor.
    """
    engine = getattr(model, ATTRIBUTE)
    kwargs = {name: argument for name, argument in (kwargs or {}).items() if name != "output"}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    # Both steps draw nothing of the run's random numbers.
    with torch.random.fork_rng(), torch.inference_mode(False):
        with engine.detached():
            wanted = _step(model, args, kwargs)
        ours = _step(model, args, kwargs)

    # A forward may have changed buffers, such as running means.
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])

    # The output is whole on every rank; gradients are parts until they are averaged.
    names = [name for name in wanted if name != OUTPUT]
    for name in names:
        ours[name] = _averaged(ours[name], engine.mesh)

    floor = NOISE_FLOOR * max((wanted[name].abs().max().item() for name in names), default=0.0)
    differences = [_difference(ours[OUTPUT], wanted[OUTPUT], 0.0)]
    differences += [_difference(ours[name], wanted[name], floor) for name in names]
    output, *gradients = _largest_over_ranks(differences, engine.mesh)

    # The coarsest: a model may keep its norms in fp32 and compute the rest in bf16.
    tolerance = max(TOLERANCE.get(tensor.dtype, 1e-3) for tensor in wanted.values())
    return Verdict(
        output=output,
        gradients=dict(zip(names, gradients, strict=True)),
        all_zero=tuple(name for name in names if not wanted[name].any() and not ours[name].any()),
        tolerance=tolerance,
    )


def _averaged(gradient: Tensor, mesh: SequenceMesh) -> Tensor:
    """The mean over the ranks of a group."""
    # Autograd expands or shares what it can.
    whole = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=mesh.sp_group)
    return whole / mesh.sp_size


def _largest_over_ranks(values: list[float], mesh: SequenceMesh) -> list[float]:
    # A maximum may lose a NaN.
    over_ranks = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=float("inf"))
    dist.all_reduce(over_ranks, op=dist.ReduceOp.MAX, group=mesh.host_group)
    largest: list[float] = over_ranks.tolist()
    return largest


def verify_first_step(model: nn.Module) -> None:
    """Verify the first batch of each group of several ranks, log the verdicts, and raise ValueError
    if one disagrees.

    Members of a group take part in all of its batches, so they agree on which one is the first.
    """
    mesh = getattr(model, ATTRIBUTE).mesh
    unverified = {group.ranks for group in mesh.own if group.sp_size > 1}

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if mesh.group not in unverified:
            return
        # Before verification, which calls the model.
        unverified.remove(mesh.group)
        if not unverified:
            handle.remove()

        verdict = verify_step(module, args, kwargs)
        if not verdict.agrees:
            raise ValueError(
                f"got another result under sequence parallelism: {verdict}; expected at most "
                f"{verdict.tolerance:.0e}; give all ranks the same weights and inputs, turn "
                "dropout off while you verify, and correct the model's ShardPlan or sharding_points"
            )
        logger.info("%s", verdict)

    handle = model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
    # unwrap removes it as well.
    getattr(model, ATTRIBUTE).handles.append(handle)


def _step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The whole output, and the gradients of a weighted sum of it, without touching ``p.grad``."""
    with torch.enable_grad():
        args, kwargs = tree_map(_copied, (args, kwargs))
        output = model(*args, **kwargs)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)

        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients: tuple[Tensor, ...] = ()
        if named:
            loss = (output * weights).sum()
            # Unused ones get zeros.
            gradients = torch.autograd.grad(
                loss, list(named.values()), allow_unused=True, materialize_grads=True
            )

    return {OUTPUT: output.detach(), **dict(zip(named, gradients, strict=True))}


def _copied(argument: Any) -> Any:
    """A copy of a tensor, or of the tensors of a dataclass (encoded text), without its graph.

    Two steps would go back through that graph. Inference tensors, which autograd cannot save,
    become normal ones.
    """
    if isinstance(argument, Tensor):
        return argument.detach().clone().requires_grad_(argument.requires_grad)
    if is_dataclass(argument) and not isinstance(argument, type):
        copies = {f.name: tree_map(_copied, getattr(argument, f.name)) for f in fields(argument)}
        return replace(argument, **copies)
    return argument


def _difference(ours: Tensor, theirs: Tensor, floor: float) -> float:
    if not theirs.numel():
        return 0.0
    scale = max(theirs.abs().max().item(), floor)
    difference = (ours - theirs).abs().max().item()
    return difference / scale if scale else difference
