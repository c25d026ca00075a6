"""Hook points: where tokens enter a model, change layout, attend, are recomputed, and leave.

A point runs its own ``local`` function. Code that distributes the model attaches another one with
``attach``, which gets the local one and its arguments. The points below hold no parameters, so
state dicts are the same with and without. ``Shard``, ``Switch`` and ``Gather`` lie outside of the
code that gradient checkpointing recomputes.
A self-attention (``layers.py``) is a hook point as well: its input and output can be brought into
another layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .attention import attention
from .functions import take
from .kernels.fused import Part, chosen
from .packing import Groups
from .recompute import Recompute
from .token_layout import SPATIAL, PatchGrid, Rows, unpatchify


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
    """Where tokens enter: which rows are local, on one rank all spatial rows.

    The ``Shard`` of ``parallel/engine.py`` is a part of the output.
    """

    def local(self, grid: PatchGrid) -> Rows:
        return grid.rows(SPATIAL)


class Switch(Point):
    """Where tokens change layout: spatial rows to temporal rows, or back.

    ``before_modulation``: in this model a modulation comes next. Its kernel reads tokens where they
    lie, and writes them in its own layout, so they are not copied for it.
    """

    before_modulation: bool = False

    def local(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        is_read_in_place = self.before_modulation and chosen("modulation", x)
        return rows.transpose(x, copy=not is_read_in_place)


class Attend(Point):
    """Where the tokens of a row, a window or a clip attend to each other.

    ``kind`` of the attention, spatial or temporal, chooses the backend.
    q, k and v are ``[R, L, H, D]``. ``groups`` are the rows, windows or clips of these tokens, if
    found ahead. Tokens outside of their clip get zero.
    """

    def __init__(self, kind: str = SPATIAL) -> None:
        super().__init__()
        self.kind = kind

    def local(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, groups: Groups | None = None
    ) -> Tensor:
        backend = rows.grid.attention.get(self.kind, "auto")
        if groups is None:
            groups = rows.groups()
        if groups.are_rows:
            return attention(q, k, v, backend=backend)

        shape, index = v.shape, groups.index
        q, k, v = (z.flatten(0, 1) for z in (q, k, v))  # [N, H, D] each
        if index is not None:
            outside = torch.zeros_like(v)
            q, k, v = (take(z, index) for z in (q, k, v))

        # A comparison, which no graph fixes to a number.
        if len(q) > 0:
            out = attention(q, k, v, lengths=groups.packing, backend=backend)
        else:
            # Without a token here, all three get a gradient, as on ranks that hold tokens.
            out = (q + k + v).to(v.dtype)
        return (out if index is None else outside.index_copy(0, index, out)).view(shape)


class Segment(Point):
    """Where the work between two switches runs, plainly or under gradient checkpointing.

    ``recompute`` says what backward computes again, None for nothing. ``last``: no switch follows.
    """

    def local(
        self,
        function: Callable[..., Any],
        rows: Rows,
        *args: Any,
        recompute: Recompute | None,
        last: bool,
        **options: Any,
    ) -> Any:
        if recompute is None:
            return function(*args)
        return recompute.run(function, *args, **options)


class Tokenwise(Point):
    """Where a block ends with work on single tokens, so that chunks of rows can be finished alone.

    ``function`` takes ``tokens``, ``[R, L, C]`` each, and ``entries`` of a modulation,
    ``[b, 1 or n, 1 or L, C]`` with b * n = R. With a ``part``, its last argument, entries are of
    whole samples, and the tokens are that part of their rows.
    """

    def local(
        self,
        function: Callable[..., Tensor],
        rows: Rows,
        tokens: Sequence[Tensor],
        entries: Sequence[Tensor],
        part: Part | None = None,
    ) -> Tensor:
        return function(*tokens, *entries, part)


class Gather(Point):
    """Where the output leaves: rows ``[R, L, V * c]`` -> ``[B, c, frames, height, width]``."""

    def local(self, x: Tensor, rows: Rows) -> Tensor:
        return unpatchify(x, rows)
