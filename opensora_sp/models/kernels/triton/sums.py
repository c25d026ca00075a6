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


@triton.jit(do_not_specialize=["num_parts"])
def _sum_parts(parts, total, num_parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    sums = sum_rows(parts, 0, num_parts, width, column, inside, ROWS)
    tl.store(total + column, sums.to(total.dtype.element_ty), inside)


@triton.jit
def sum_rows(table, start, stop, step, column, inside, ROWS: tl.constexpr):
    """Sums of columns over the rows of a table from ``start`` to ``stop``; ``step`` is the distance
    of two rows."""
    sums = tl.zeros([ROWS, column.shape[0]], table.dtype.element_ty)
    for begin in range(start, stop, ROWS):
        row = begin + tl.arange(0, ROWS)
        mask = (row < stop)[:, None] & inside[None, :]
        offset = row.to(tl.int64)[:, None] * step + column[None, :]
        sums += tl.load(table + offset, mask, other=0)
    return tl.sum(sums, 0)
