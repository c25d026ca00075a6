"""LayerNorm and modulation of tokens, and the residual connections around them.

Entries of a modulation are ``[b, 1 or n, 1 or L, C]``: of b samples of n rows, for each sample, for
each of its rows or for each token of a row. Tokens ``[R, L, C]`` are all rows of these samples.
Where they are but a part, ``rows`` is n, and ``first`` the row of the first sample with which they
begin.

Legend: R rows, L tokens of a row, C width, b samples of n rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..examples import Example, Sizes, normal

EPSILON = 1e-6


def norm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, *, first: int = 0, rows: int = 0
) -> tuple[Tensor, Tensor]:
    """``norm(x) * (1 + scale) + shift``, by a LayerNorm without weights.

    Returns:
        x and the modulated tokens. Callers go on with this x, so that backward gets the gradients
        of both at once.
    """
    shift, scale = (_of_rows(entry, x, first, rows) for entry in (shift, scale))
    normalized = F.layer_norm(x, x.shape[-1:], eps=EPSILON)
    return x, torch.addcmul(shift, _by_sample(normalized, shift), 1 + scale).flatten(0, 1)


def add_norm_modulate(
    x: Tensor,
    branch: Tensor,
    shift: Tensor,
    scale: Tensor,
    *,
    first: int = 0,
    rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """``x + branch``, and that sum normalized and modulated."""
    return norm_modulate(x + branch, shift, scale, first=first, rows=rows)


def add_gated(x: Tensor, gate: Tensor, branch: Tensor, *, first: int = 0, rows: int = 0) -> Tensor:
    """``x + gate * branch``."""
    gate = _of_rows(gate, x, first, rows)
    return torch.addcmul(_by_sample(x, gate), gate, _by_sample(branch, gate)).flatten(0, 1)


def _of_rows(entry: Tensor, x: Tensor, first: int, rows: int) -> Tensor:
    """An entry of samples of which the tokens are a part, row by row: ``[1, R, 1 or L, C]``."""
    if not rows:
        return entry
    return entry.expand(-1, rows, -1, -1).flatten(0, 1)[None, first : first + len(x)]


def _by_sample(x: Tensor, entry: Tensor) -> Tensor:
    """Tokens ``[R, L, C]`` as ``[b, n, L, C]``, against which an entry is broadcast."""
    return x.unflatten(0, (len(entry), len(x) // len(entry)))


def examples(sizes: Sizes) -> Iterator[Example]:
    """Entries of samples, of the frames of spatial rows and of those of temporal ones."""
    tokens = {name: normal(6, 5, sizes.width, seed=i) for i, name in enumerate(("x", "branch"))}
    for shape in ((2, 1, 1), (2, 3, 1), (2, 1, 5)):
        entries = normal(*shape, 3, sizes.width, seed=2).unbind(-2)
        shift, scale, gate = (entry.contiguous() for entry in entries)

        modulation = dict(shift=shift, scale=scale)
        of_norm, of_both = dict(x=tokens["x"], **modulation), tokens | modulation
        yield Example("norm_modulate", of_norm, gradients=tuple(of_norm))
        yield Example("add_norm_modulate", of_both, gradients=tuple(of_both))
        yield Example("add_gated", tokens | dict(gate=gate), gradients=("x", "gate", "branch"))
