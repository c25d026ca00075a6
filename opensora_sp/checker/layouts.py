"""Layouts of a tensor over ranks, inferred by comparison with the tensor of one process.

P ranks. A candidate gathers the ranks' tensors to tensors of the whole shape; the first that equals
the reference is the layout, otherwise the nearest of those that the shapes allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .definition import Cut, Layout

MAX_ROWS = 4096  # of an axis whose rows are looked for in any order


class Match(NamedTuple):
    """A layout, and the error of the tensors that it gathers."""

    error: float
    layout: str


def distance(got: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference, relative to the largest entry expected, which is at least ``floor``."""
    if got.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    got, expected = wide(got), wide(expected)
    difference = float((got - expected).abs().max())
    scale = max(float(expected.abs().max()), floor)
    if difference == 0 or math.isnan(scale):
        return 0.0 if difference == 0 else math.inf
    return difference / scale if scale and math.isfinite(difference) else math.inf


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float64; complex numbers get an axis of two."""
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def partitions(num_ranks: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Ways to group the ranks: all, then consecutive ranks and equal strides, largest first."""
    ranks = list(range(num_ranks))
    yield "", [ranks]
    for size in range(num_ranks // 2, 1, -1):
        if num_ranks % size == 0:
            groups = num_ranks // size
            consecutive = [ranks[start : start + size] for start in range(0, num_ranks, size)]
            yield f" over {size} consecutive ranks", consecutive
            yield f" over every {groups}th rank", [ranks[start::groups] for start in range(groups)]


def match(
    reference: Tensor,
    parts: list[Tensor],
    bound: float,
    *,
    declared: Layout | None = None,
    is_final: bool = False,
) -> Match | None:
    """The layout of the ranks' parts; None if there is none of their shapes.

    Args:
        bound: of the error, up to which tensors are equal.
        is_final: no reordered rows and no partial sums, which a later module would mend.
    """
    nearest: Match | None = None
    for layout, gathered in _candidates(reference, parts, declared):
        error = max(distance(tensor, reference) for tensor in gathered)
        if nearest is None or error < nearest.error:
            nearest = Match(error, layout)
        if error <= bound:
            return nearest

    if declared is None and not is_final:
        for error, layout in _mended_later(reference, parts):
            if error <= bound:
                return Match(error, layout)
    return nearest


def differing_axis(reference: torch.Size, shapes: list[torch.Size]) -> int | None:
    """The only axis on which a rank's shape differs from the reference's; None if not one."""
    if any(len(shape) != len(reference) for shape in shapes):
        return None
    axes = [
        axis for axis, size in enumerate(reference) if any(shape[axis] != size for shape in shapes)
    ]
    return axes[0] if len(axes) == 1 else None


def _candidates(
    reference: Tensor, parts: list[Tensor], declared: Layout | None
) -> Iterator[tuple[str, list[Tensor]]]:
    """Layouts that the shapes allow, each with the tensors that it gathers."""
    shapes = [part.shape for part in parts]
    is_whole = all(shape == reference.shape for shape in shapes)
    if declared == "replicated" or (declared is None and is_whole):
        yield "replicated", parts
        return

    if isinstance(declared, Cut):
        yield f"cut on axis {declared.dim}", [torch.cat(parts, declared.dim)]
        return

    axis = differing_axis(reference.shape, shapes)
    if axis is None:
        return
    size, sizes = reference.shape[axis], [shape[axis] for shape in shapes]
    for ranks, groups in partitions(len(parts)):
        gathered = [torch.cat([parts[rank] for rank in group], axis) for group in groups]
        if all(tensor.shape[axis] == size for tensor in gathered):
            yield f"cut on axis {axis}{ranks}", gathered

    excess = sum(sizes) - size
    if excess < 0:
        # Also where the ranks' rows are right, some are lost.
        yield f"cut on axis {axis}, {-excess} of {size} missing", [torch.cat(parts, axis)]
    if excess > 0 and len(set(sizes)) == 1 and excess < len(parts):
        yield f"cut on axis {axis}, padded", [torch.cat(parts, axis).narrow(axis, 0, size)]
    if excess > 0 and excess % (len(parts) - 1) == 0:
        yield from _partly_replicated(parts, axis, excess // (len(parts) - 1))


def _partly_replicated(
    parts: list[Tensor], axis: int, count: int
) -> Iterator[tuple[str, list[Tensor]]]:
    """Layouts whose first or last ``count`` rows are whole on each rank, such as text."""
    sizes = [part.shape[axis] - count for part in parts]
    if min(sizes) < 0:
        return

    first = [part.split([count, size], axis) for part, size in zip(parts, sizes)]
    local = torch.cat([rows for _, rows in first], axis)
    gathered = [torch.cat([shared, local], axis) for shared, _ in first]
    yield f"cut on axis {axis}, its first {count} replicated", gathered

    last = [part.split([size, count], axis) for part, size in zip(parts, sizes)]
    local = torch.cat([rows for rows, _ in last], axis)
    gathered = [torch.cat([local, shared], axis) for _, shared in last]
    yield f"cut on axis {axis}, its last {count} replicated", gathered


def _mended_later(reference: Tensor, parts: list[Tensor]) -> Iterator[Match]:
    """Layouts that only the contents show: partial sums, and rows in another order."""
    if all(part.shape == reference.shape for part in parts):
        total = torch.stack([wide(part) for part in parts]).sum(0)
        yield Match(distance(total, wide(reference)), "partial sums")
        return

    axis = differing_axis(reference.shape, [part.shape for part in parts])
    if axis is None or sum(part.shape[axis] for part in parts) != reference.shape[axis]:
        return
    if reference.shape[axis] <= MAX_ROWS and reference.numel():
        expected = wide(reference).movedim(axis, 0).flatten(1)
        got = wide(torch.cat(parts, axis)).movedim(axis, 0).flatten(1)
        distances = torch.cdist(got, expected, p=math.inf)
        # Each row of one side is somewhere on the other.
        error = max(float(distances.amin(0).max()), float(distances.amin(1).max()))
        scale = float(expected.abs().max())
        yield Match(error / scale if scale else error, f"cut on axis {axis}, in another order")
