"""Kernels of LayerNorm, modulation and residual connections; see ``modulation.py``.

A rank's tokens are numbered in the order of the modulation's entries: tokens with the same entry
follow each other. A program works on consecutive ones, in pieces that share an entry, which is
read once. In backward it sums the gradients of an entry over each piece in registers, and the
gradient of the branch's bias over all of them; a second kernel adds up pieces and programs. Both
add in a fixed order, without atomics.

Tokens that come from the other layout, and their gradients, are read where they lie: transposed.
"""

import triton
import triton.language as tl

from .sums import sum_rows

# Integers whose values compile no kernel of their own.
COUNTS = (
    "length",
    "shared_rows",
    "shared_length",
    "first",
    "local_rows",
    "large_programs",
    "large",
    "small",
)
# Distances in memory of a tensor's rows, and of the tokens of a row, in tokens.
X_STEPS, TOTAL_STEPS = ("x_row", "x_token"), ("total_row", "total_token")
GRAD_STEPS = ("grad_row", "grad_token")


@triton.jit
def _program_tokens(program, tokens, large_programs, large, small):
    """The first token of a program, and the end."""
    before = tl.minimum(program, large_programs)
    begin = before * large + (program - before) * small
    size = tl.where(program < large_programs, large, small)
    return begin, tl.minimum(begin + size, tokens)


@triton.jit
def _program_at(token, large_programs, large, small):
    """The program that works on a token."""
    after_large = token - large_programs * large
    return tl.where(after_large < 0, token // large, large_programs + after_large // small)


@triton.jit
def _row_group(group, layout):
    """The first local row of rows that share entries, and how many of their tokens share each."""
    _, shared_rows, shared_length, first, local_rows = layout

    # Some of the rows may come before the local ones, or after them.
    row = group * shared_rows - first
    begin, end = tl.maximum(row, 0), tl.minimum(row + shared_rows, local_rows)
    return begin, tl.maximum(end - begin, 0) * shared_length


@triton.jit
def _entry_tokens(entry, layout):
    """The first token of an entry, and the count of its tokens."""
    length, _, shared_length, _, _ = layout
    entries_of_row = length // shared_length
    row, count = _row_group(entry // entries_of_row, layout)
    return row * length + entry % entries_of_row * count, count


@triton.jit
def _piece(begin, end, layout):
    """The tokens from ``begin`` to ``end`` that share an entry with the first of them.

    Returns:
        The entry, its first local row and its first token in each row, its first token, and the
        end of the piece.
    """
    length, shared_rows, shared_length, first, _ = layout
    group = (begin // length + first) // shared_rows
    row, count = _row_group(group, layout)

    place = (begin - row * length) // count
    entry = group * (length // shared_length) + place
    entry_begin = row * length + place * count
    stop = tl.minimum(entry_begin + count, end)
    return entry.to(tl.int64), row, place * shared_length, entry_begin, stop


@triton.jit
def _sums_row(program, entry, layout):
    """The row for the sums of a piece. From one piece to the next, the program or the entry or both
    go up by one: no two pieces share a row, and rows of an entry follow each other."""
    length, shared_rows, shared_length, first, _ = layout
    return program + entry - first // shared_rows * (length // shared_length)


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
    """The bias that is added to each token of a branch, or zeros."""
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
    length,
    shared_rows,
    shared_length,
    first,
    local_rows,
    large_programs,
    large,
    small,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    layout = (length, shared_rows, shared_length, first, local_rows)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    added = _bias(bias, columns, inside, WIDE)

    begin, end = _program_tokens(
        tl.program_id(0), length * local_rows, large_programs, large, small
    )
    while begin < end:
        entry, first_row, first_token, entry_begin, stop = _piece(begin, end, layout)
        place = entry * stride + columns
        offset = tl.load(shift + place, inside, 0).to(WIDE)
        factor = 1 + tl.load(scale + place, inside, 0).to(WIDE)

        for number in range(begin - entry_begin, stop - entry_begin):
            row, token = first_row + number // shared_length, first_token + number % shared_length
            place = _place(row, length, token, 1, columns, WIDTH)
            at_x = _place(row, x_row, token, x_token, columns, WIDTH)
            tokens = tl.load(x + at_x, inside, 0)
            if branch is not None:
                sum_ = tokens.to(WIDE) + tl.load(branch + place, inside, 0).to(WIDE) + added
                tokens = sum_.to(tokens.dtype)
                tl.store(total + place, tokens, inside)
            normalized, _ = _normalize(tokens.to(WIDE), inside, WIDTH, EPS)
            tl.store(modulated + place, normalized * factor + offset, inside)
        begin = stop


@triton.jit(do_not_specialize=(*TOTAL_STEPS, *GRAD_STEPS, *COUNTS))
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
    bias_sums,
    stride,
    length,
    shared_rows,
    shared_length,
    first,
    local_rows,
    large_programs,
    large,
    small,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    layout = (length, shared_rows, shared_length, first, local_rows)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    grad_bias = tl.zeros([BLOCK], WIDE)

    begin, end = _program_tokens(
        tl.program_id(0), length * local_rows, large_programs, large, small
    )
    while begin < end:
        entry, first_row, first_token, entry_begin, stop = _piece(begin, end, layout)
        factor = 1 + tl.load(scale + entry * stride + columns, inside, 0).to(WIDE)
        grad_shift = tl.zeros([BLOCK], WIDE)
        grad_scale = tl.zeros([BLOCK], WIDE)

        for number in range(begin - entry_begin, stop - entry_begin):
            row, token = first_row + number // shared_length, first_token + number % shared_length
            place = _place(row, length, token, 1, columns, WIDTH)
            at_total = _place(row, total_row, token, total_token, columns, WIDTH)
            at_grad = _place(row, grad_row, token, grad_token, columns, WIDTH)
            x = tl.load(total + at_total, inside, 0).to(WIDE)
            slope = tl.load(grad_modulated + place, inside, 0).to(WIDE)
            normalized, inverse = _normalize(x, inside, WIDTH, EPS)
            grad_shift += slope
            grad_scale += slope * normalized

            slope *= factor
            mean = tl.sum(slope, 0) / WIDTH
            projection = tl.sum(slope * normalized, 0) / WIDTH
            grad_x = (slope - mean - normalized * projection) * inverse
            # Loaded before the reductions, it would spill 8 to 16 bytes of each thread.
            grad_x += tl.load(grad_total + at_grad, inside, 0).to(WIDE)
            grad_bias += grad_x
            tl.store(grad + place, grad_x, inside)

        place = _sums_row(tl.program_id(0), entry, layout) * 2 * WIDTH + columns
        tl.store(sums + place, grad_shift, inside)
        tl.store(sums + place + WIDTH, grad_scale, inside)
        begin = stop

    if bias_sums is not None:
        tl.store(bias_sums + tl.program_id(0) * WIDTH + columns, grad_bias, inside)


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
    length,
    shared_rows,
    shared_length,
    first,
    local_rows,
    large_programs,
    large,
    small,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    layout = (length, shared_rows, shared_length, first, local_rows)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    added = _bias(bias, columns, inside, WIDE)

    begin, end = _program_tokens(
        tl.program_id(0), length * local_rows, large_programs, large, small
    )
    while begin < end:
        entry, first_row, first_token, entry_begin, stop = _piece(begin, end, layout)
        factor = tl.load(gate + entry * stride + columns, inside, 0).to(WIDE)

        for number in range(begin - entry_begin, stop - entry_begin):
            row, token = first_row + number // shared_length, first_token + number % shared_length
            place = _place(row, length, token, 1, columns, WIDTH)
            at_x = _place(row, x_row, token, x_token, columns, WIDTH)
            sum_ = tl.load(x + at_x, inside, 0).to(WIDE)
            sum_ += factor * (tl.load(branch + place, inside, 0).to(WIDE) + added)
            tl.store(total + place, sum_, inside)
        begin = stop


@triton.jit(do_not_specialize=(*GRAD_STEPS, *COUNTS))
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
    bias_sums,
    stride,
    length,
    shared_rows,
    shared_length,
    first,
    local_rows,
    large_programs,
    large,
    small,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    layout = (length, shared_rows, shared_length, first, local_rows)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    added = _bias(bias, columns, inside, WIDE)
    grad_bias = tl.zeros([BLOCK], WIDE)

    begin, end = _program_tokens(
        tl.program_id(0), length * local_rows, large_programs, large, small
    )
    while begin < end:
        entry, first_row, first_token, entry_begin, stop = _piece(begin, end, layout)
        factor = tl.load(gate + entry * stride + columns, inside, 0).to(WIDE)
        grad_gate = tl.zeros([BLOCK], WIDE)

        for number in range(begin - entry_begin, stop - entry_begin):
            row, token = first_row + number // shared_length, first_token + number % shared_length
            place = _place(row, length, token, 1, columns, WIDTH)
            at_grad = _place(row, grad_row, token, grad_token, columns, WIDTH)
            grad_sum = tl.load(grad_total + at_grad, inside, 0).to(WIDE)
            if branch is not None:
                branch_tokens = tl.load(branch + place, inside, 0)
            if other is not None:
                grad_sum += tl.load(other + place, inside, 0).to(WIDE)
                tl.store(grad + place, grad_sum, inside)
            if branch is not None:
                grad_gate += grad_sum * (branch_tokens.to(WIDE) + added)
            scaled = grad_sum * factor
            grad_bias += scaled
            tl.store(grad_branch + place, scaled, inside)

        if sums is not None:
            place = _sums_row(tl.program_id(0), entry, layout) * WIDTH + columns
            tl.store(sums + place, grad_gate, inside)
        begin = stop

    if bias_sums is not None:
        tl.store(bias_sums + tl.program_id(0) * WIDTH + columns, grad_bias, inside)


@triton.jit(do_not_specialize=("entries", "programs", *COUNTS))
def add_pieces_kernel(
    sums,
    bias_sums,
    total,
    grad_bias,
    entries,
    programs,
    length,
    shared_rows,
    shared_length,
    first,
    local_rows,
    large_programs,
    large,
    small,
    KINDS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the sums of pieces for each kind and entry, and, in the last programs, the sums of
    backward's programs for the bias."""
    layout = (length, shared_rows, shared_length, first, local_rows)
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.program_id(0) // tiles
    inside = column < WIDTH

    if number < KINDS * entries:
        kind, entry = number // entries, number % entries
        begin, count = _entry_tokens(entry, layout)
        start_program = _program_at(begin, large_programs, large, small)
        last_program = _program_at(begin + count - 1, large_programs, large, small)
        start = _sums_row(start_program, entry, layout)
        # Entries of other ranks have no tokens here, and no rows.
        stop = tl.where(count > 0, start + last_program - start_program + 1, start)
        added = sum_rows(sums + kind * WIDTH, start, stop, KINDS * WIDTH, column, inside, ROWS)
        place = number.to(tl.int64) * WIDTH + column
        tl.store(total + place, added.to(total.dtype.element_ty), inside)
    elif bias_sums is not None:
        added = sum_rows(bias_sums, 0, programs, WIDTH, column, inside, ROWS)
        tl.store(grad_bias + column, added.to(grad_bias.dtype.element_ty), inside)
