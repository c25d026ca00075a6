"""Outputs and gradients of transformers of diffusers, on one process or several, compared."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_sp.checker.recording import Lifted
from opensora_sp.parallel import SequenceMesh


def results_of(
    model: nn.Module,
    inputs: dict[str, Any],
    *,
    mesh: SequenceMesh | None = None,
    lifts: bool = True,
) -> dict[str, Tensor]:
    """Outputs, gradients of the inputs and of all parameters, averaged over the ranks.

    Args:
        lifts: casts to float32 to float64.
    """
    model.zero_grad()
    leaves = dict(inputs)
    for name, x in inputs.items():
        if is_float(x):
            leaves[name] = x.clone().requires_grad_()
    with Lifted() if lifts else nullcontext():
        outputs = model(**leaves, return_dict=False)
        sum((x * x.detach().numel() * weights_like(x)).sum() for x in outputs).backward()
    gradients = {name: leaves[name].grad for name, x in inputs.items() if is_float(x)}
    gradients |= {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = {name: whole(x) for name, x in gradients.items() if x is not None}
    if mesh is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= mesh.sp_size
    return {f"output {i}": x.detach() for i, x in enumerate(outputs)} | gradients


def whole(gradient: Tensor) -> Tensor:
    """A copy, of the parts of all ranks under ``fully_shard``."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64


def weights_like(x: Tensor) -> Tensor:
    return torch.arange(x.numel()).view_as(x).sin()


def assert_same(
    ours: dict[str, Tensor], expected: dict[str, Tensor], case: str, bound: float = 1e-9
) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        limit = bound * tensor.norm() + 0.01 * bound * len(tensor.flatten())
        difference = (ours[name] - tensor).norm()
        assert difference <= limit, (case, name, difference)
