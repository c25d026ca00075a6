"""The places where tokens enter a model, change layout, attend to each other, are recomputed, and leave it.

A point does its local thing by itself. Whoever distributes the model hangs a function on it with ``attach``; that
function receives the point's local one and its arguments. The points below hold no parameters, so state dicts are the
same with and without. ``Shard``, ``Switch`` and ``Gather`` lie outside of what gradient checkpointing recomputes.
A self-attention (``layers.py``) is a point as well: what goes in and comes out can be brought into another layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import attention
from .rows import SPATIAL, PatchGrid, Rows, unpatchify


class Point(nn.Module):
    """A named place in the model's data flow, replaceable from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.attached: Callable[..., Any] | None = None

    def attach(self, function: Callable[..., Any]) -> None:
        """Run ``function(local, *args)`` at this place from now on."""
        self.attached = function

    def detach(self) -> None:
        """Go back to the local function."""
        self.attached = None

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.attached is None:
            return self.local(*args, **options)
        return self.attached(self.local, *args, **options)

    def local(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


class Shard(Point):
    """Where tokens enter: which spatial rows are held here."""

    def local(self, grid: PatchGrid) -> Rows:
        return grid.rows(SPATIAL)


class Switch(Point):
    """Where tokens change layout: spatial rows to temporal rows, or back."""

    def local(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        x = rearrange(x, "(b row) token c -> (b token) row c", row=rows.per_sample)  # whole samples
        start, stop = (edge // rows.per_sample * rows.length for edge in (rows.start, rows.stop))
        return x, rows.turned().take(start, stop)


class Attend(Point):
    """Where the tokens of a row attend to each other; queries, keys and values are ``[R, L, H, D]``."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend

    def local(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        return attention(q, k, v, backend=self.backend)


class Segment(Point):
    """Where the work between two switches runs, plainly or dropping its inner tensors, to compute them in backward.

    ``last`` says that no switch follows.
    """

    def local(
        self, function: Callable[..., Any], rows: Rows, *args: Any, recompute: bool, last: bool, **options: Any
    ) -> Any:
        if not recompute:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **options)


class Rowwise(Point):
    """Where a block ends with work on single tokens, so that rows may be finished a few at a time."""

    def local(self, function: Callable[..., Tensor], rows: Rows, *per_row: Tensor) -> Tensor:
        return function(*per_row)


class Gather(Point):
    """Where the output leaves: temporal rows ``[B * S, T, V * c]`` become latents ``[B, c, frames, height, width]``."""

    def local(self, x: Tensor, rows: Rows) -> Tensor:
        return unpatchify(x, rows.grid)
