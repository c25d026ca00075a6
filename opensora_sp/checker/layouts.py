"""Layouts of a tensor over ranks, inferred by comparison with the tensor of one process.

A candidate gathers the ranks' parts to tensors of the whole shape. The first candidate that equals
the reference is the layout; otherwise it is the nearest of those that the shapes allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .interface import Cut, Layout


class Match(NamedTuple):
    """A layout, and the error of the tensors that it gathers."""

    error: float
    layout: str


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float64; complex numbers get an axis of two."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def distance(got: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference, relative to the largest entry expected, which is at least ``floor``."""
    if got.shape != expected.shape:
        return math.inf
    difference = (wide(got) - wide(expected)).abs()
    if not difference.any():
        return 0.0
    error = float(difference.max()) / max(float(wide(expected).abs().max()), floor, 1e-300)
    return error if math.isfinite(error) else math.inf


def partitions(num_ranks: int) -> Iterator[tuple[str, list[range]]]:
    """Ways to group the ranks: all, then consecutive ranks and equal strides, largest first."""
    yield "", [range(num_ranks)]
    for size in range(num_ranks // 2, 1, -1):
        count, rest = divmod(num_ranks, size)
        if not rest:
            starts = range(0, num_ranks, size)
            yield f" over {size} consecutive ranks", [range(n, n + size) for n in starts]
            strided = [range(start, num_ranks, count) for start in range(count)]
            yield f" over {size} ranks in steps of {count}", strided


def match(
    reference: Tensor, parts: list[Tensor], bound: float, declared: Layout | None, *, is_final: bool
) -> Match | None:
    """The layout of the ranks' parts; None if there is none of their shapes.

    Args:
        bound: of the error, up to which tensors are equal.
        is_final: no reordered rows and no partial sums, which a later module would mend.
    """
    matches = [
        Match(max(distance(tensor, reference) for tensor in gathered), layout)
        for layout, gathered in _candidates(reference, parts, declared)
    ]
    # A final output is compared whatever its shape is.
    unknown = Match(math.inf, f"{[list(part.shape) for part in parts]} on the ranks")
    nearest = min(matches, default=unknown if is_final else None)
    if nearest is None or nearest.error <= bound or declared or is_final:
        return nearest
    mended = _mended_later(reference, parts)
    return mended if mended.error <= bound else nearest


def _candidates(
    reference: Tensor, parts: list[Tensor], declared: Layout | None
) -> Iterator[tuple[str, list[Tensor]]]:
    """Layouts that the shapes allow, each with the tensors that it gathers."""
    axis = _differing_axis(reference, parts)
    if isinstance(declared, Cut):
        yield f"cut on axis {declared.dim}", [torch.cat(parts, declared.dim)]
    elif declared or all(part.shape == reference.shape for part in parts):
        yield "replicated", parts
    elif axis is not None:
        yield from _cuts(parts, axis, reference.shape[axis])


def _differing_axis(reference: Tensor, parts: list[Tensor]) -> int | None:
    """The only axis on which a rank's shape differs from the reference's; None if not one."""
    if any(part.ndim != reference.ndim for part in parts):
        return None
    sizes = zip(*(part.shape for part in parts))
    axes = [axis for axis, size in enumerate(sizes) if {*size} != {reference.shape[axis]}]
    return axes[0] if len(axes) == 1 else None


def _cuts(parts: list[Tensor], axis: int, size: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Cuts of an axis, whole or not, of ``size`` in one process."""
    name, sizes = f"cut on axis {axis}", [part.shape[axis] for part in parts]
    for where, groups in partitions(len(parts)):
        gathered = [torch.cat([parts[rank] for rank in group], axis) for group in groups]
        if all(tensor.shape[axis] == size for tensor in gathered):
            yield name + where, gathered

    excess = sum(sizes) - size
    if excess < 0:
        yield f"{name}, {-excess} of {size} missing", [torch.cat(parts, axis)]
    elif 0 < excess < len(parts) and len({*sizes}) == 1:
        yield f"{name}, padded", [torch.cat(parts, axis).narrow(axis, 0, size)]

    # Some rows are whole on each rank, such as the text of joint streams.
    shared, rest = divmod(excess, len(parts) - 1)
    if 0 < shared <= min(sizes) and not rest:
        first = [part.tensor_split([shared], axis) for part in parts]
        local = [rows for _, rows in first]
        gathered = [torch.cat([text, *local], axis) for text, _ in first]
        yield f"{name}, its first {shared} replicated", gathered

        last = [part.tensor_split([-shared], axis) for part in parts]
        local = [rows for rows, _ in last]
        gathered = [torch.cat([*local, text], axis) for _, text in last]
        yield f"{name}, its last {shared} replicated", gathered


def _mended_later(reference: Tensor, parts: list[Tensor]) -> Match:
    """Layouts that only the contents show: partial sums, and rows in another order."""
    axis = _differing_axis(reference, parts)
    if axis is None:
        total = torch.stack([wide(part) for part in parts]).sum(0)
        return Match(distance(total, wide(reference)), "partial sums")
    joined = torch.cat(parts, axis)
    # Sorted, entries lie as near to each other as the rows that they come from.
    ordered, expected = (wide(x).sort(axis).values for x in (joined, reference))
    return Match(distance(ordered, expected), f"cut on axis {axis}, in another order")
