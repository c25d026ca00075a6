"""The second stage of gradients that are sums over all tokens.

In the first stage each program adds up the tokens that it reads, in registers. This one adds the
programs' sums. Without atomics the order of additions is fixed, so results are the same each time.
The number of programs depends on shapes alone, so all devices add in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 16  # of a tile


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums ``[P, N]`` of P programs -> ``[N]``, rounded once."""
    total = parts.new_empty(parts.shape[1], dtype=dtype)
    grid = (triton.cdiv(parts.shape[1], COLUMNS),)
    _sum_parts[grid](parts, total, *parts.shape, ROWS=ROWS, COLUMNS=COLUMNS)
    return total


def sum_parts_and_bias(
    parts: Tensor, dtype: torch.dtype, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sums ``[P, k, N, C]`` of P programs over the tokens of N entries each.

    Returns:
        The entries' gradients, ``[k, N, C]`` of this dtype, without the last of k if that is of a
        bias; and the gradient of the bias, ``[C]``, summed over the entries as well. Empty without
        a bias.
    """
    if bias is None:
        total = sum_parts(parts.flatten(1), dtype).view(parts.shape[1:])
        return total, parts.new_empty(0, dtype=dtype)

    num_parts, kinds, entries, width = parts.shape
    total = parts.new_empty(kinds - 1, entries, width, dtype=dtype)
    of_bias = torch.empty_like(bias)
    grid = (triton.cdiv(total.numel(), COLUMNS) + triton.cdiv(width, COLUMNS),)
    _sum_parts_and_bias[grid](
        parts, total, of_bias, num_parts, entries, total.numel(), width, ROWS=ROWS, COLUMNS=COLUMNS
    )
    return total, of_bias


@triton.jit(do_not_specialize=["num_parts"])
def _sum_parts(parts, total, num_parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, COLUMNS], parts.dtype.element_ty)

    for start in range(0, num_parts, ROWS):
        mask = (start + row < num_parts)[:, None] & (column < width)[None, :]
        offset = (start + row)[:, None] * width + column[None, :]
        sums += tl.load(parts + offset, mask, other=0)

    tl.store(total + column, tl.sum(sums, 0).to(total.dtype.element_ty), column < width)


@triton.jit(do_not_specialize=["num_parts", "entries"])
def _sum_parts_and_bias(
    parts,
    total,
    of_bias,
    num_parts,
    entries,
    of_entries,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The first programs add up the columns of entries; the last ones those of the bias, of which
    each part has a row for each entry."""
    first_of_bias = tl.cdiv(of_entries, COLUMNS)
    is_bias = tl.program_id(0) >= first_of_bias
    block = tl.where(is_bias, tl.program_id(0) - first_of_bias, tl.program_id(0))
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < tl.where(is_bias, width, of_entries)

    rows_of_part = tl.where(is_bias, entries, 1)
    start = tl.where(is_bias, of_entries, 0)
    sums = tl.zeros([ROWS, COLUMNS], parts.dtype.element_ty)
    for first in range(0, num_parts * rows_of_part, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_parts * rows_of_part)[:, None] & inside[None, :]
        part, entry = row // rows_of_part, row % rows_of_part
        place = part.to(tl.int64) * (of_entries + entries * width) + start + entry * width
        sums += tl.load(parts + place[:, None] + column[None, :], mask, other=0)

    found = tl.sum(sums, 0)
    tl.store(total + column, found.to(total.dtype.element_ty), inside & (not is_bias))
    tl.store(of_bias + column, found.to(of_bias.dtype.element_ty), inside & is_bias)
