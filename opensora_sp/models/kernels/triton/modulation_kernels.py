"""Kernels of LayerNorm, modulation and residual connections; see ``modulation.py``.

A program works on tokens that share an entry of the modulation, and reads the entry once. In
backward it sums the gradients of the entry and of the branch's bias over its tokens in registers,
and a second kernel adds up the programs. Both add in a fixed order, without atomics.

Tokens that come from the other layout, and their gradients, are read where they lie: transposed.
"""

import triton
import triton.language as tl

# Integers whose values compile no kernel of their own.
COUNTS = ("rows", "length", "shared_rows", "shared_length", "first", "local_rows", "programs")
# Distances in memory of a tensor's rows, and of the tokens of a row, in tokens.
X_STEPS, TOTAL_STEPS = ("x_row", "x_token"), ("total_row", "total_token")
GRAD_STEPS = ("grad_row", "grad_token")


@triton.jit
def _share(rows, length, shared_rows, shared_length, first, local_rows, programs):
    """The entry of this program, its first local row and first token, and which to work on."""
    entry = tl.program_id(0) // programs
    entries_of_row = length // shared_length
    entries_of_sample = rows // shared_rows * entries_of_row

    # Of the rows that share the entry, some may come before the local ones or after them.
    row = entry // entries_of_sample * rows + entry % entries_of_sample // entries_of_row - first
    begin_row, end_row = tl.maximum(row, 0), tl.minimum(row + shared_rows, local_rows)
    count = tl.maximum(end_row - begin_row, 0) * shared_length
    size = tl.cdiv(count, programs)
    begin = tl.program_id(0) % programs * size
    end = tl.minimum(begin + size, count)
    return entry.to(tl.int64), begin_row, entry % entries_of_row, begin, end


@triton.jit
def _place(row, row_step, token, token_step, columns, WIDTH: tl.constexpr):
    """Where the channels of a token lie; steps are in tokens."""
    return (row * row_step + token * token_step).to(tl.int64) * WIDTH + columns


@triton.jit
def _normalize(row, inside, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """A token normalized, and the inverse of its standard deviation."""
    centered = tl.where(inside, row - tl.sum(row, 0) / WIDTH, 0)
    inverse = tl.rsqrt(tl.sum(centered * centered, 0) / WIDTH + EPS)
    return centered * inverse, inverse


@triton.jit
def _bias(bias, columns, inside, WIDE: tl.constexpr):
    """What is added to each token of a branch: zeros without a bias."""
    if bias is None:
        return tl.zeros([columns.shape[0]], WIDE)
    else:
        return tl.load(bias + columns, inside, 0).to(WIDE)


@triton.jit(do_not_specialize=(*X_STEPS, *COUNTS))
def norm_modulate_kernel(
    x,
    x_row,
    x_token,
    branch,
    bias,
    shift,
    scale,
    total,
    modulated,
    stride,
    rows,
    length,
    shared_rows,
    shared_length,
    first,
    local_rows,
    programs,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    entry, first_row, first_token, begin, end = _share(
        rows, length, shared_rows, shared_length, first, local_rows, programs
    )
    place = entry * stride + columns
    offset = tl.load(shift + place, inside, 0).to(WIDE)
    factor = 1 + tl.load(scale + place, inside, 0).to(WIDE)
    added = _bias(bias, columns, inside, WIDE)

    for number in range(begin, end):
        row, token = first_row + number // shared_length, first_token + number % shared_length
        place = _place(row, length, token, 1, columns, WIDTH)
        at_x = _place(row, x_row, token, x_token, columns, WIDTH)
        own = tl.load(x + at_x, inside, 0)
        if branch is not None:
            sum_ = own.to(WIDE) + tl.load(branch + place, inside, 0).to(WIDE) + added
            own = sum_.to(own.dtype)
            tl.store(total + place, own, inside)
        normalized, _ = _normalize(own.to(WIDE), inside, WIDTH, EPS)
        tl.store(modulated + place, normalized * factor + offset, inside)


@triton.jit(do_not_specialize=("entries", *TOTAL_STEPS, *GRAD_STEPS, *COUNTS))
def norm_modulate_backward_kernel(
    total,
    total_row,
    total_token,
    scale,
    grad_total,
    grad_row,
    grad_token,
    grad_modulated,
    grad,
    sums,
    stride,
    entries,
    rows,
    length,
    shared_rows,
    shared_length,
    first,
    local_rows,
    programs,
    HAS_BIAS: tl.constexpr,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    entry, first_row, first_token, begin, end = _share(
        rows, length, shared_rows, shared_length, first, local_rows, programs
    )
    factor = 1 + tl.load(scale + entry * stride + columns, inside, 0).to(WIDE)
    grad_shift = tl.zeros([BLOCK], WIDE)
    grad_scale = tl.zeros([BLOCK], WIDE)
    grad_bias = tl.zeros([BLOCK], WIDE)

    for number in range(begin, end):
        row, token = first_row + number // shared_length, first_token + number % shared_length
        place = _place(row, length, token, 1, columns, WIDTH)
        at_total = _place(row, total_row, token, total_token, columns, WIDTH)
        at_grad = _place(row, grad_row, token, grad_token, columns, WIDTH)
        x = tl.load(total + at_total, inside, 0).to(WIDE)
        own = tl.load(grad_modulated + place, inside, 0).to(WIDE)
        normalized, inverse = _normalize(x, inside, WIDTH, EPS)
        grad_shift += own
        grad_scale += own * normalized

        own *= factor
        mean = tl.sum(own, 0) / WIDTH
        slope = tl.sum(own * normalized, 0) / WIDTH
        own = (own - mean - normalized * slope) * inverse
        own += tl.load(grad_total + at_grad, inside, 0).to(WIDE)
        grad_bias += own
        tl.store(grad + place, own, inside)

    place = (tl.program_id(0) % programs * (2 + HAS_BIAS) * entries + entry) * WIDTH + columns
    tl.store(sums + place, grad_shift, inside)
    tl.store(sums + place + entries * WIDTH, grad_scale, inside)
    if HAS_BIAS:
        tl.store(sums + place + 2 * entries * WIDTH, grad_bias, inside)


@triton.jit(do_not_specialize=(*X_STEPS, *COUNTS))
def add_gated_kernel(
    x,
    x_row,
    x_token,
    gate,
    branch,
    bias,
    total,
    stride,
    rows,
    length,
    shared_rows,
    shared_length,
    first,
    local_rows,
    programs,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    entry, first_row, first_token, begin, end = _share(
        rows, length, shared_rows, shared_length, first, local_rows, programs
    )
    factor = tl.load(gate + entry * stride + columns, inside, 0).to(WIDE)
    added = _bias(bias, columns, inside, WIDE)

    for number in range(begin, end):
        row, token = first_row + number // shared_length, first_token + number % shared_length
        place = _place(row, length, token, 1, columns, WIDTH)
        at_x = _place(row, x_row, token, x_token, columns, WIDTH)
        own = tl.load(x + at_x, inside, 0).to(WIDE)
        own += factor * (tl.load(branch + place, inside, 0).to(WIDE) + added)
        tl.store(total + place, own, inside)


@triton.jit(do_not_specialize=("entries", *GRAD_STEPS, *COUNTS))
def add_gated_backward_kernel(
    gate,
    branch,
    bias,
    grad_total,
    grad_row,
    grad_token,
    other,
    grad,
    grad_branch,
    sums,
    stride,
    entries,
    rows,
    length,
    shared_rows,
    shared_length,
    first,
    local_rows,
    programs,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    entry, first_row, first_token, begin, end = _share(
        rows, length, shared_rows, shared_length, first, local_rows, programs
    )
    factor = tl.load(gate + entry * stride + columns, inside, 0).to(WIDE)
    added = _bias(bias, columns, inside, WIDE)
    grad_gate = tl.zeros([BLOCK], WIDE)
    grad_total_sum = tl.zeros([BLOCK], WIDE)

    for number in range(begin, end):
        row, token = first_row + number // shared_length, first_token + number % shared_length
        place = _place(row, length, token, 1, columns, WIDTH)
        at_grad = _place(row, grad_row, token, grad_token, columns, WIDTH)
        own = tl.load(grad_total + at_grad, inside, 0).to(WIDE)
        if other is not None:
            own += tl.load(other + place, inside, 0).to(WIDE)
            tl.store(grad + place, own, inside)
        if branch is not None:
            grad_gate += own * (tl.load(branch + place, inside, 0).to(WIDE) + added)
        grad_total_sum += own
        tl.store(grad_branch + place, own * factor, inside)

    part = tl.program_id(0) % programs
    if sums is not None:
        kinds: tl.constexpr = 1 if bias is None else 2
        place = (part * kinds * entries + entry) * WIDTH + columns
        tl.store(sums + place, grad_gate, inside)
        if bias is not None:
            tl.store(sums + place + entries * WIDTH, grad_total_sum * factor, inside)
