"""The checker's own loss, the same in one process and on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layouts import differing_axis
from .recording import tensors_of


def own_loss(output: Any, expected: list[Tensor] | None = None, group: Any = None) -> Tensor:
    """The checker's loss: a fixed random weighting of the whole output, over its size.

    Args:
        expected: the output of one process; a rank's shard gets its part of the weights.
    """
    total = torch.zeros((), dtype=torch.float64)
    for index, leaf in enumerate(tensors_of(output)):
        shape = leaf.shape if expected is None else expected[index].shape
        generator = torch.Generator().manual_seed(index)
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        size = weights.numel()
        if group is not None:
            weights = _part(weights, leaf.shape, group)
        total = total + (leaf.double().cpu() * weights).sum() / size
    return total


def _part(weights: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """The rank's part of the weights, of an output that stays cut."""
    shapes = [shape] * dist.get_world_size(group)
    dist.all_gather_object(shapes, shape, group=group)
    axis = differing_axis(weights.shape, shapes)
    sizes = [0 if axis is None else shape[axis] for shape in shapes]
    if axis is not None and sum(sizes) == weights.shape[axis]:
        parts: tuple[Tensor, ...] = torch.split(weights, sizes, axis)
        return parts[dist.get_rank(group)]
    # Another shape is reported as a difference of the output, whatever the gradients are.
    return weights if shape == weights.shape else torch.ones(shape, dtype=torch.float64)
