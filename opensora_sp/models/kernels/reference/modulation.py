"""LayerNorm and modulation of tokens, and the residual connections around them.

Entries of a modulation are ``[b, 1 or n, 1 or L, C]``: of b samples of n rows, for each sample, for
each of its rows or for each token of a row. Tokens ``[R, L, C]`` are those of all these rows, or
the ``part`` of them that is given.

Legend: R rows, L tokens of a row, C width, b samples of n rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..examples import Example, Sizes, normal

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
    shift, scale = _of_rows(shift, x, part), _of_rows(scale, x, part)
    normalized = F.layer_norm(x, x.shape[-1:], eps=EPSILON)
    return x, torch.addcmul(shift, _by_sample(normalized, shift), 1 + scale).flatten(0, 1)


def add_norm_modulate(
    x: Tensor,
    branch: Tensor,
    shift: Tensor,
    scale: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``x + branch``, and that sum normalized and modulated.

    ``bias`` ``[C]`` is that of the branch's last layer, if it was left out there.
    """
    branch = branch if bias is None else branch + bias
    return norm_modulate(x + branch, shift, scale, part)


def add_gated(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``x + gate * branch``; ``bias`` as in ``add_norm_modulate``."""
    branch = branch if bias is None else branch + bias
    gate = _of_rows(gate, x, part)
    return torch.addcmul(_by_sample(x, gate), gate, _by_sample(branch, gate)).flatten(0, 1)


def add_gated_twice(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``add_gated`` for two callers: backward gets both gradients, and adds them on the way."""
    total = add_gated(x, gate, branch, part, bias)
    return total, total


def _of_rows(entry: Tensor, x: Tensor, part: Part | None) -> Tensor:
    """The entry of each row of a part, ``[1, R, 1 or L, C]``."""
    if part is None:
        return entry
    by_row = entry.expand(-1, part.rows, -1, -1).flatten(0, 1)
    return by_row[None, part.first : part.first + len(x)]


def _by_sample(x: Tensor, entry: Tensor) -> Tensor:
    """Tokens ``[R, L, C]`` as ``[b, n, L, C]``, against which an entry is broadcast."""
    return x.unflatten(0, (len(entry), len(x) // len(entry)))


def examples(sizes: Sizes) -> Iterator[Example]:
    """Entries of samples, of the frames of spatial rows and of those of temporal ones."""
    tokens = {name: normal(6, 5, sizes.width, seed=i) for i, name in enumerate(("x", "branch"))}
    bias = normal(sizes.width, seed=3)
    for shape in ((2, 1, 1), (2, 3, 1), (2, 1, 5)):
        entries = normal(*shape, 3, sizes.width, seed=2).unbind(-2)
        shift, scale, gate = (entry.contiguous() for entry in entries)

        modulation = dict(shift=shift, scale=scale)
        of_norm, of_both = dict(x=tokens["x"], **modulation), tokens | modulation
        yield Example("norm_modulate", of_norm, gradients=tuple(of_norm))
        yield Example("add_norm_modulate", of_both, gradients=tuple(of_both))
        yield Example("add_gated", tokens | dict(gate=gate), gradients=("x", "gate", "branch"))

        # Without the bias of the branch's last layer; tokens that lie in the other layout.
        across = dict(x=_transposed(tokens["x"]), branch=tokens["branch"], bias=bias)
        for function, own in (
            ("add_norm_modulate", modulation),
            ("add_gated_twice", {"gate": gate}),
        ):
            arguments = across | own
            yield Example(function, arguments, gradients=tuple(arguments))

    # One row of each of two samples of three rows.
    x, branch = normal(2, 5, sizes.width), normal(2, 5, sizes.width, seed=1)
    of_part = dict(x=x, gate=gate, branch=branch, part=Part(first=2, rows=3))
    yield Example("add_gated", of_part, gradients=("x", "gate", "branch"))


def _transposed(x: Tensor) -> Tensor:
    """The same numbers, with those of a row's first token next to each other."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)
