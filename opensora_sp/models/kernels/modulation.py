"""LayerNorm and modulation of tokens, and the residual connections around them.

Entries of a modulation are ``[b, 1 or n, 1 or L, C]``: of b samples of n rows, for each sample, for
each of its rows or for each token of a row. Tokens ``[R, L, C]`` are all these rows, or a ``part``
of them. Results have the dtype of ``x``; entries may be wider.

Legend: R rows, L tokens of a row, C width, b samples of n rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .selection import chosen

EPSILON = 1e-6


@dataclass(frozen=True)
class Part:
    """Consecutive rows of samples, perhaps not all of the first sample and of the last one.

    Attributes:
        first: the number of the first of these rows in the first sample.
        rows: n, of a sample.
    """

    first: int
    rows: int

    def after(self, rows: int) -> Part:
        """The part that begins so many rows later."""
        return replace(self, first=self.first + rows)


def norm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """``norm(x) * (1 + scale) + shift``, by a LayerNorm without weights.

    Returns:
        x and the modulated tokens. Callers use this x from then on, so that backward gets the
        gradients of both at once.
    """
    if chosen("modulation", x):
        return _triton().norm_modulate(x, shift, scale, part)

    shift, scale = _row_entries(shift, x, part), _row_entries(scale, x, part)
    normalized = F.layer_norm(x, x.shape[-1:], eps=EPSILON)
    modulated = torch.addcmul(shift, _by_sample(normalized, shift), 1 + scale)
    return x, modulated.flatten(0, 1).to(x.dtype)


def add_norm_modulate(
    x: Tensor,
    branch: Tensor,
    shift: Tensor,
    scale: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``x + branch``, and this sum normalized and modulated.

    Args:
        bias: ``[C]``, the bias of the branch's last layer, if it was left out there.
    """
    if chosen("modulation", x):
        return _triton().add_norm_modulate(x, branch, shift, scale, part, bias)

    branch = branch if bias is None else branch + bias
    return norm_modulate((x + branch).to(x.dtype), shift, scale, part)


def add_gated(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``x + gate * branch``; ``bias`` as in ``add_norm_modulate``."""
    if chosen("modulation", x):
        return _triton().add_gated(x, gate, branch, part, bias)

    branch = branch if bias is None else branch + bias
    gate = _row_entries(gate, x, part)
    total = torch.addcmul(_by_sample(x, gate), gate, _by_sample(branch, gate))
    return total.flatten(0, 1).to(x.dtype)


def add_gated_twice(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``add_gated`` for two callers: backward gets both gradients, and adds them on the way."""
    if chosen("modulation", x):
        return _triton().add_gated_twice(x, gate, branch, part, bias)

    total = add_gated(x, gate, branch, part, bias)
    return total, total


def _row_entries(entry: Tensor, x: Tensor, part: Part | None) -> Tensor:
    """The entry of each row of a part, ``[1, R, 1 or L, C]``."""
    if part is None:
        return entry
    by_row = entry.expand(-1, part.rows, -1, -1).flatten(0, 1)
    return by_row[None, part.first : part.first + len(x)]


def _by_sample(x: Tensor, entry: Tensor) -> Tensor:
    """Tokens ``[R, L, C]`` as ``[b, n, L, C]``, against which an entry is broadcast."""
    return x.unflatten(0, (len(entry), len(x) // len(entry)))


def _triton() -> Any:
    """The Triton kernels, whose imports take a second and fail where Triton is not installed."""
    from .triton import modulation

    return modulation
