"""LayerNorm, modulation and residual connections in one pass over the tokens, either direction.

Traffic in E, activations of C numbers for each token:

    =================  ==============================  ==========================================
    function           forward                         backward
    =================  ==============================  ==========================================
    norm_modulate      2: reads x, writes modulated    4: reads x, both gradients; writes x's
    add_norm_modulate  4: reads x and branch, writes   4: reads the sum, both gradients; writes
                       sum and modulated               one gradient for x and branch
    add_gated          3: reads x and branch, writes   3: reads branch and the gradient, which is
                       sum                             also x's; writes branch's
    =================  ==============================  ==========================================

A program works on tokens that share an entry of the modulation, and reads the entry once. In
backward it sums the entry's gradient over its tokens in registers, and a second kernel adds up the
programs. Both add in a fixed order, without atomics.

Legend: as in ``reference/modulation.py``; N entries of a table ``[N, C]``.
"""

from dataclasses import astuple, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.modulation import EPSILON, Part
from .operator import opaque_operator
from .sums import sum_parts

TOKENS = 4  # of a program in forward
FEWEST_TOKENS = 16  # of a program in backward, since each writes sums
PROGRAMS = 528  # at least, in backward: four for each multiprocessor of an H100

# Integers whose values compile no kernel of their own.
COUNTS = ("rows", "length", "shared_rows", "shared_length", "first", "local_rows", "programs")


@triton.jit
def _share(rows, length, shared_rows, shared_length, first, local_rows, programs):
    """The entry of this program, the entry's first local token, and which of them to work on."""
    entry = tl.program_id(0) // programs
    entries_of_row = length // shared_length
    entries_of_sample = rows // shared_rows * entries_of_row

    # Of the rows that share the entry, some may come before the local ones or after them.
    row = entry // entries_of_sample * rows + entry % entries_of_sample // entries_of_row - first
    begin_row, end_row = tl.maximum(row, 0), tl.minimum(row + shared_rows, local_rows)
    start = begin_row.to(tl.int64) * length + entry % entries_of_row

    count = tl.maximum(end_row - begin_row, 0) * shared_length
    size = tl.cdiv(count, programs)
    begin = tl.program_id(0) % programs * size
    return entry.to(tl.int64), start, begin, tl.minimum(begin + size, count)


@triton.jit
def _normalize(row, inside, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """A token normalized, and the inverse of its standard deviation."""
    centered = tl.where(inside, row - tl.sum(row, 0) / WIDTH, 0)
    inverse = tl.rsqrt(tl.sum(centered * centered, 0) / WIDTH + EPS)
    return centered * inverse, inverse


@triton.jit(do_not_specialize=COUNTS)
def _norm_modulate_kernel(
    x,
    branch,
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
    entry, start, begin, end = _share(
        rows, length, shared_rows, shared_length, first, local_rows, programs
    )
    place = entry * stride + columns
    offset = tl.load(shift + place, inside, 0).to(WIDE)
    factor = 1 + tl.load(scale + place, inside, 0).to(WIDE)

    for number in range(begin, end):
        token = start + number // shared_length * length + number % shared_length
        place = token * WIDTH + columns
        row = tl.load(x + place, inside, 0)
        if branch is not None:
            row = (row.to(WIDE) + tl.load(branch + place, inside, 0).to(WIDE)).to(row.dtype)
            tl.store(total + place, row, inside)
        normalized, _ = _normalize(row.to(WIDE), inside, WIDTH, EPS)
        tl.store(modulated + place, normalized * factor + offset, inside)


@triton.jit(do_not_specialize=("entries", *COUNTS))
def _norm_modulate_backward_kernel(
    total,
    scale,
    grad_total,
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
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    entry, start, begin, end = _share(
        rows, length, shared_rows, shared_length, first, local_rows, programs
    )
    factor = 1 + tl.load(scale + entry * stride + columns, inside, 0).to(WIDE)
    grad_shift = tl.zeros([BLOCK], WIDE)
    grad_scale = tl.zeros([BLOCK], WIDE)

    for number in range(begin, end):
        token = start + number // shared_length * length + number % shared_length
        place = token * WIDTH + columns
        row = tl.load(total + place, inside, 0).to(WIDE)
        own = tl.load(grad_modulated + place, inside, 0).to(WIDE)
        normalized, inverse = _normalize(row, inside, WIDTH, EPS)
        grad_shift += own
        grad_scale += own * normalized

        own *= factor
        mean = tl.sum(own, 0) / WIDTH
        slope = tl.sum(own * normalized, 0) / WIDTH
        own = (own - mean - normalized * slope) * inverse
        own += tl.load(grad_total + place, inside, 0).to(WIDE)
        tl.store(grad + place, own, inside)

    place = (tl.program_id(0) % programs * 2 * entries + entry) * WIDTH + columns
    tl.store(sums + place, grad_shift, inside)
    tl.store(sums + place + entries * WIDTH, grad_scale, inside)


@triton.jit(do_not_specialize=COUNTS)
def _add_gated_kernel(
    x,
    gate,
    branch,
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
    entry, start, begin, end = _share(
        rows, length, shared_rows, shared_length, first, local_rows, programs
    )
    factor = tl.load(gate + entry * stride + columns, inside, 0).to(WIDE)

    for number in range(begin, end):
        token = start + number // shared_length * length + number % shared_length
        place = token * WIDTH + columns
        row = tl.load(x + place, inside, 0).to(WIDE)
        row += factor * tl.load(branch + place, inside, 0).to(WIDE)
        tl.store(total + place, row, inside)


@triton.jit(do_not_specialize=("entries", *COUNTS))
def _add_gated_backward_kernel(
    gate,
    branch,
    grad_total,
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
    entry, start, begin, end = _share(
        rows, length, shared_rows, shared_length, first, local_rows, programs
    )
    factor = tl.load(gate + entry * stride + columns, inside, 0).to(WIDE)
    grad_gate = tl.zeros([BLOCK], WIDE)

    for number in range(begin, end):
        token = start + number // shared_length * length + number % shared_length
        place = token * WIDTH + columns
        own = tl.load(grad_total + place, inside, 0).to(WIDE)
        grad_gate += own * tl.load(branch + place, inside, 0).to(WIDE)
        tl.store(grad_branch + place, own * factor, inside)

    place = (tl.program_id(0) % programs * entries + entry) * WIDTH + columns
    tl.store(sums + place, grad_gate, inside)


@dataclass(frozen=True)
class _Shares:
    """How the tokens are shared out to programs; the fields are the kernels' ``COUNTS``.

    Attributes:
        rows, length: n of a sample, and L.
        shared_rows, shared_length: rows, and tokens in each of them, that share an entry.
        first, local_rows: the local rows, counted from the first sample's first row.
        programs: of each entry.
    """

    rows: int
    length: int
    shared_rows: int
    shared_length: int
    first: int
    local_rows: int
    programs: int


def _shares(x: Tensor, entry: Tensor, first: int, rows: int, *, backward: bool) -> _Shares:
    rows, length = rows or len(x) // len(entry), x.shape[1]
    shared_rows, shared_length = rows // entry.shape[1], length // entry.shape[2]

    most = min(shared_rows, len(x)) * shared_length
    programs = triton.cdiv(most, FEWEST_TOKENS if backward else TOKENS)
    if backward:
        entries = entry.numel() // entry.shape[-1]
        programs = min(programs, triton.cdiv(PROGRAMS, entries))
    return _Shares(rows, length, shared_rows, shared_length, first, len(x), programs)


def _constants(x: Tensor) -> dict[str, Any]:
    """What the kernels for tokens such as x are compiled for."""
    block = triton.next_power_of_2(x.shape[-1])
    return dict(
        WIDTH=x.shape[-1],
        BLOCK=block,
        WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        # A thread loads 8 numbers at a time, 16 bytes of bf16, and at most twice.
        num_warps=min(max(block // 512, 1), 16),
    )


def _tables(*entries: Tensor) -> list[Tensor]:
    """Entries ``[b, 1 or n, 1 or L, C]`` as tables ``[N, C]`` with the same strides."""
    tables = [entry.reshape(-1, entry.shape[-1]) for entry in entries]
    if len({table.stride() for table in tables}) > 1 or tables[0].stride(1) != 1:
        tables = [table.contiguous() for table in tables]
    return tables


def _like(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape or x.shape, dtype=x.dtype, device=x.device)


def _wide(x: Tensor, *shape: int) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty(shape, dtype=dtype, device=x.device)


def _norm_modulate(
    x: Tensor, branch: Tensor | None, shift: Tensor, scale: Tensor, first: int, rows: int
) -> tuple[Tensor, Tensor]:
    """The sum of x and branch, empty without a branch, and the modulated tokens."""
    x = x.contiguous()
    total, modulated = _fake_norm_modulate(x, branch, shift, scale, first, rows)
    if not x.numel():
        return total, modulated

    shifts, scales = _tables(shift, scale)
    shares = _shares(x, shift, first, rows, backward=False)
    _norm_modulate_kernel[len(shifts) * shares.programs,](
        x,
        branch.contiguous() if branch is not None else None,
        shifts,
        scales,
        total if branch is not None else None,
        modulated,
        shifts.stride(0),
        *astuple(shares),
        EPS=EPSILON,
        **_constants(x),
    )
    return total, modulated


def _norm_modulate_backward(
    total: Tensor,
    scale: Tensor,
    grad_total: Tensor,
    grad_modulated: Tensor,
    first: int,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of the sum, and of shift and scale, ``[2, b, 1 or n, 1 or L, C]``."""
    total = total.contiguous()
    grad = _like(total)
    if not total.numel():
        return grad, scale.new_zeros(2, *scale.shape)

    (scales,) = _tables(scale)
    shares = _shares(total, scale, first, rows, backward=True)
    sums = _wide(scale, shares.programs, 2, *scales.shape)
    _norm_modulate_backward_kernel[len(scales) * shares.programs,](
        total,
        scales,
        grad_total.contiguous(),
        grad_modulated.contiguous(),
        grad,
        sums,
        scales.stride(0),
        len(scales),
        *astuple(shares),
        EPS=EPSILON,
        **_constants(total),
    )
    return grad, sum_parts(sums.flatten(1), scale.dtype).view(2, *scale.shape)


def _add_gated(x: Tensor, gate: Tensor, branch: Tensor, first: int, rows: int) -> Tensor:
    x = x.contiguous()
    total = _like(x)
    if x.numel():
        (gates,) = _tables(gate)
        shares = _shares(x, gate, first, rows, backward=False)
        _add_gated_kernel[len(gates) * shares.programs,](
            x,
            gates,
            branch.contiguous(),
            total,
            gates.stride(0),
            *astuple(shares),
            **_constants(x),
        )
    return total


def _add_gated_backward(
    gate: Tensor, branch: Tensor, grad_total: Tensor, first: int, rows: int
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and branch."""
    branch = branch.contiguous()
    grad_branch = _like(branch)
    if not branch.numel():
        return gate.new_zeros(gate.shape), grad_branch

    (gates,) = _tables(gate)
    shares = _shares(branch, gate, first, rows, backward=True)
    sums = _wide(gate, shares.programs, *gates.shape)
    _add_gated_backward_kernel[len(gates) * shares.programs,](
        gates,
        branch,
        grad_total.contiguous(),
        grad_branch,
        sums,
        gates.stride(0),
        len(gates),
        *astuple(shares),
        **_constants(branch),
    )
    return sum_parts(sums.flatten(1), gate.dtype).view(gate.shape), grad_branch


def _fake_norm_modulate(
    x: Tensor, branch: Tensor | None, shift: Tensor, scale: Tensor, first: int, rows: int
) -> tuple[Tensor, Tensor]:
    return _like(x, 0) if branch is None else _like(x), _like(x)


def _fake_norm_modulate_backward(
    total: Tensor,
    scale: Tensor,
    grad_total: Tensor,
    grad_modulated: Tensor,
    first: int,
    rows: int,
) -> tuple[Tensor, Tensor]:
    return _like(total), _like(scale, 2, *scale.shape)


def _fake_add_gated(x: Tensor, gate: Tensor, branch: Tensor, first: int, rows: int) -> Tensor:
    return _like(x)


def _fake_add_gated_backward(
    gate: Tensor, branch: Tensor, grad_total: Tensor, first: int, rows: int
) -> tuple[Tensor, Tensor]:
    return _like(gate), _like(branch)


norm_modulate_forward = opaque_operator("norm_modulate", _norm_modulate, _fake_norm_modulate)
norm_modulate_backward = opaque_operator(
    "norm_modulate_backward", _norm_modulate_backward, _fake_norm_modulate_backward
)
add_gated_forward = opaque_operator("add_gated", _add_gated, _fake_add_gated)
add_gated_backward = opaque_operator(
    "add_gated_backward", _add_gated_backward, _fake_add_gated_backward
)


class _NormModulate(torch.autograd.Function):
    """Returns the sum, or x itself, too: backward gets its gradient and adds nothing apart."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        shift: Tensor,
        scale: Tensor,
        first: int,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        total, modulated = norm_modulate_forward(x, branch, shift, scale, first, rows)
        if branch is None:
            total = x.view_as(x)
        ctx.save_for_backward(total, scale)
        ctx.adds, ctx.rows = branch is not None, (first, rows)
        return total, modulated

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_modulated: Tensor) -> tuple[Tensor | None, ...]:
        total, scale = ctx.saved_tensors
        grad, entries = norm_modulate_backward(total, scale, grad_total, grad_modulated, *ctx.rows)
        shift, scale = entries.unbind()
        return grad, grad if ctx.adds else None, shift, scale, None, None


class _AddGated(torch.autograd.Function):
    """The gradient of x is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, branch: Tensor, first: int, rows: int) -> Tensor:
        ctx.save_for_backward(gate, branch)
        ctx.rows = (first, rows)
        return add_gated_forward(x, gate, branch, first, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *add_gated_backward(*ctx.saved_tensors, grad, *ctx.rows), None, None


def norm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """See ``reference/modulation.py``."""
    return _NormModulate.apply(x, None, shift, scale, *_numbers(part))


def add_norm_modulate(
    x: Tensor, branch: Tensor, shift: Tensor, scale: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """See ``reference/modulation.py``."""
    return _NormModulate.apply(x, branch, shift, scale, *_numbers(part))


def add_gated(x: Tensor, gate: Tensor, branch: Tensor, part: Part | None = None) -> Tensor:
    """See ``reference/modulation.py``."""
    return _AddGated.apply(x, gate, branch, *_numbers(part))


def _numbers(part: Part | None) -> tuple[int, int]:
    """Arguments ``first`` and ``rows`` of the operators; no rows stand for whole samples."""
    return (0, 0) if part is None else (part.first, part.rows)
