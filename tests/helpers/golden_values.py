"""Reading the reference values, and the one place that says how near to them is near enough.

The tolerances are those of the reference data (tests/golden/README.md). They are relative to the
largest absolute entry, since that is what rounding is relative to: a small entry of a sum of large
terms carries the rounding of the large ones, and another processor rounds in another order.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden"
RELATIVE = 1e-4


def load(kind: str, name: str) -> tuple[dict, dict[str, torch.Tensor]]:
    path = GOLDEN / kind / name
    return json.loads(path.with_suffix(".json").read_text()), load_file(
        path.with_suffix(".safetensors")
    )


def under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)
    }


def close(ours: torch.Tensor, theirs: torch.Tensor, *, floor: float = 1e-5) -> None:
    """Outputs: each entry of the first dim is a result of its own, with a largest entry of its own.

    So a loss per sample is compared number by number, and a sample of small values is not hidden
    behind one of large values.
    """
    largest = theirs.abs() if theirs.ndim < 2 else theirs.abs().flatten(1).amax(1)
    _within(ours, theirs, floor + RELATIVE * largest)


def close_gradient(
    ours: torch.Tensor, theirs: torch.Tensor, *, floor: float = 0.0, name: str = "gradient"
) -> None:
    """Gradients: relative to the largest entry of the whole tensor."""
    _within(ours, theirs, floor + RELATIVE * theirs.abs().max(), name)


def close_sum(ours: torch.Tensor, theirs: torch.Tensor, *, bound: float = 1e-3) -> None:
    """A sum over many terms of both signs, whose own size says nothing about its rounding."""
    _within(ours, theirs, torch.tensor(bound))


def close_table(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    *,
    relative: float = 0.0,
    floor: float = 0.0,
    name: str = "table",
) -> None:
    """Tables that a formula gives entry by entry, in one precision: each entry by itself."""
    _within(ours, theirs, floor + relative * theirs.abs(), name)


def _within(
    ours: torch.Tensor, theirs: torch.Tensor, bound: torch.Tensor, name: str = "values"
) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
    assert theirs.isfinite().all(), f"{name}: the reference is not finite"

    error = (ours.detach() - theirs).abs()
    bounds = bound.reshape(bound.shape + (1,) * (error.ndim - bound.ndim)).expand_as(error)
    outside = ~(error <= bounds)  # so that NaN is outside
    if outside.any():
        worst = error[outside].max().item()
        least = bounds[outside].min().item()
        count = f"{int(outside.sum())} of {error.numel()}"
        raise AssertionError(
            f"{name}: {count} entries are off, by up to {worst:.3g}; bound {least:.3g}"
        )
