"""LayerNorm and modulation of tokens, and the residual connections around them.

Entries of a modulation are ``[b, 1 or n, 1 or L, C]``: of b samples of n rows, for each sample, for
each of its rows or for each token of a row. Tokens ``[R, L, C]`` are those of all these rows, or
the ``part`` of them that is given. Results have the dtype of ``x``; entries may be wider.

Legend: R rows, L tokens of a row, C width, b samples of n rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

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
    """``x + branch``, and that sum normalized and modulated.

    ``bias`` ``[C]`` is that of the branch's last layer, if it was left out there.
    """
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
    branch = branch if bias is None else branch + bias
    gate = _of_rows(gate, x, part)
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
    """Calls as models make them, and without a bias, as where adapters stand in for layers.

    Entries of samples, of the frames of spatial rows and of those of temporal ones; tokens and
    gradients that lie in this layout or in the other one; all rows of samples, or some of them.
    """
    of_rows = (2, 3, 1)
    for per in ((1, 1, 1), (2, 1, 1), of_rows, (2, 1, 5)):
        for x_lies_across in (False, True):
            # A kernel that took one for the other would be wrong in either case.
            given = _arguments(sizes.width, per, x_lies_across=x_lies_across)
            yield from _calls(given, gradients_lie_across=not x_lies_across)
            # The final layer has a modulation of its own, in the dtype of tokens.
            yield replace(_example("norm_modulate", given), kept=())

    given = _arguments(sizes.width, of_rows, first=2)
    yield from _calls(given)
    yield from _calls(given | dict(bias=None), gradients_lie_across=True)

    # Entries and biases are frozen under LoRA.
    for function in ("add_gated", "add_gated_twice"):
        yield replace(_example(function, given), gradients=("x", "branch"))

    # Large and small shares of several tokens for an entry, and several entries for each share.
    for per, rows in (((2, 1, 1), (3, 250)), ((1, 500, 1), (500, 3))):
        yield _example("add_norm_modulate", _arguments(sizes.width, per, rows=rows))


FUNCTIONS = {
    "norm_modulate": ("x", "shift", "scale", "part"),
    "add_norm_modulate": ("x", "branch", "shift", "scale", "part", "bias"),
    "add_gated": ("x", "gate", "branch", "part", "bias"),
    "add_gated_twice": ("x", "gate", "branch", "part", "bias"),
}


def _calls(given: dict[str, Any], *, gradients_lie_across: bool = False) -> Iterator[Example]:
    for function in FUNCTIONS:
        example = _example(function, given)
        yield replace(example, swapped={0: (0, 1)}) if gradients_lie_across else example


def _example(function: str, given: dict[str, Any]) -> Example:
    arguments = {name: given[name] for name in FUNCTIONS[function]}
    gradients = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    return Example(function, arguments, tuple(gradients), kept=("shift", "scale", "gate"))


def _arguments(
    width: int,
    per: tuple[int, int, int],
    *,
    rows: tuple[int, int] = (3, 5),
    first: int = 0,
    x_lies_across: bool = False,
) -> dict[str, Any]:
    """Of b samples with entries ``per`` of them, ``[b, 1 or n, 1 or L]``.

    Shift, scale and gate are cut out of one table, in float32. With ``first``, tokens are those
    from this row of the first sample to the same of the last one.
    """
    (rows_of_sample, length), samples = rows, per[0]
    shape = (samples - bool(first)) * rows_of_sample, length, width
    x, branch = normal(*shape), normal(*shape, seed=1)
    shift, scale, gate = normal(*per, 3, width, seed=2).unbind(-2)
    return dict(
        x=_across(x) if x_lies_across else x,
        branch=branch,
        bias=normal(width, seed=3),
        shift=shift,
        scale=scale,
        gate=gate,
        part=Part(first, rows_of_sample),
    )


def _across(x: Tensor) -> Tensor:
    """The same numbers, row by row of the other layout."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)
