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
    add_gated_twice    3                               5: reads branch and two gradients; writes
                                                       their sum, x's, and branch's
    =================  ==============================  ==========================================

Here are the launches and the autograd functions; ``modulation_kernels.py`` has the kernels.

Legend: as in ``reference/modulation.py``; N entries of a table ``[N, C]``.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.modulation import EPSILON, Part
from .modulation_kernels import (
    add_gated_backward_kernel,
    add_gated_kernel,
    norm_modulate_backward_kernel,
    norm_modulate_kernel,
)
from .operator import opaque_operator
from .sums import sum_parts_and_bias

TOKENS = 4  # of a program in forward
FEWEST_TOKENS = 16  # of a program in backward, since each writes sums
PROGRAMS = 528  # at least, in backward: four for each multiprocessor of an H100


class _Shares(NamedTuple):
    """How the tokens are distributed over programs; the fields are the kernels' ``COUNTS``.

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
        # With fewer, which more programs at a time would have, ptxas spills some.
        maxnreg=128,
    )


def _tables(*entries: Tensor) -> list[Tensor]:
    """Entries ``[b, 1 or n, 1 or L, C]`` as tables ``[N, C]`` with the same strides."""
    tables = [entry.reshape(-1, entry.shape[-1]) for entry in entries]
    if len({table.stride() for table in tables}) > 1 or tables[0].stride(1) != 1:
        tables = [table.contiguous() for table in tables]
    return tables


def _with_steps(x: Tensor) -> tuple[Tensor, int, int]:
    """Tokens ``[R, L, C]`` and the distances of rows and of a row's tokens, in tokens."""
    width = x.shape[-1]
    row, token, channel = x.stride()
    if channel != 1 or row % width or token % width:
        x = x.contiguous()
    return x, x.stride(0) // width, x.stride(1) // width


def _like(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape or x.shape, dtype=x.dtype, device=x.device)


def _wide(x: Tensor, *shape: int) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty(shape, dtype=dtype, device=x.device)


def _norm_modulate(
    x: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    first: int,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """The sum of x, branch and bias, empty without a branch, and the modulated tokens."""
    total, modulated = _fake_norm_modulate(x, branch, bias, shift, scale, first, rows)
    if not x.numel():
        return total, modulated

    shifts, scales = _tables(shift, scale)
    shares = _shares(x, shift, first, rows, backward=False)
    norm_modulate_kernel[len(shifts) * shares.programs,](
        *_with_steps(x),
        branch.contiguous() if branch is not None else None,
        bias,
        shifts,
        scales,
        total if branch is not None else None,
        modulated,
        shifts.stride(0),
        *shares,
        EPS=EPSILON,
        **_constants(x),
    )
    return total, modulated


def _norm_modulate_backward(
    total: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    grad_total: Tensor,
    grad_modulated: Tensor,
    first: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the sum, of shift and scale, ``[2, b, 1 or n, 1 or L, C]``, and of the
    bias, empty without one."""
    grad = _like(total)
    if not total.numel():
        no_bias = bias.new_zeros(bias.shape) if bias is not None else _like(scale, 0)
        return grad, scale.new_zeros(2, *scale.shape), no_bias

    (scales,) = _tables(scale)
    shares = _shares(total, scale, first, rows, backward=True)
    sums = _wide(scale, shares.programs, 2 + (bias is not None), *scales.shape)
    norm_modulate_backward_kernel[len(scales) * shares.programs,](
        *_with_steps(total),
        scales,
        *_with_steps(grad_total),
        grad_modulated.contiguous(),
        grad,
        sums,
        scales.stride(0),
        len(scales),
        *shares,
        HAS_BIAS=bias is not None,
        EPS=EPSILON,
        **_constants(total),
    )
    entries, grad_bias = sum_parts_and_bias(sums, scale.dtype, bias)
    return grad, entries.view(2, *scale.shape), grad_bias


def _add_gated(
    x: Tensor, gate: Tensor, branch: Tensor, bias: Tensor | None, first: int, rows: int
) -> Tensor:
    total = _like(x)
    if x.numel():
        (gates,) = _tables(gate)
        shares = _shares(x, gate, first, rows, backward=False)
        add_gated_kernel[len(gates) * shares.programs,](
            *_with_steps(x),
            gates,
            branch.contiguous(),
            bias,
            total,
            gates.stride(0),
            *shares,
            **_constants(x),
        )
    return total


def _add_gated_backward(
    gate: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    grad_total: Tensor,
    other: Tensor | None,
    first: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of gate, branch and bias, and the sum of both of the total's.

    Empty tensors stand for what there is not: a gate's gradient without the branch, a bias, or a
    second gradient of the total.
    """
    grad_gate, grad_branch, grad_bias, grad = _fake_add_gated_backward(
        gate, branch, bias, grad_total, other, first, rows
    )
    if not grad_total.numel():
        return grad_gate.zero_(), grad_branch, grad_bias.zero_(), grad

    (gates,) = _tables(gate)
    shares = _shares(grad_total, gate, first, rows, backward=True)
    sums = None
    if branch is not None:
        sums = _wide(gate, shares.programs, 1 + (bias is not None), *gates.shape)
    add_gated_backward_kernel[len(gates) * shares.programs,](
        gates,
        branch.contiguous() if branch is not None else None,
        bias,
        *_with_steps(grad_total),
        other.contiguous() if other is not None else None,
        grad if other is not None else None,
        grad_branch,
        sums,
        gates.stride(0),
        len(gates),
        *shares,
        **_constants(grad_total),
    )
    if sums is None:
        return grad_gate, grad_branch, grad_bias, grad
    entries, grad_bias = sum_parts_and_bias(sums, gate.dtype, bias)
    return entries.view(gate.shape), grad_branch, grad_bias, grad


def _fake_norm_modulate(
    x: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    first: int,
    rows: int,
) -> tuple[Tensor, Tensor]:
    return _like(x, 0) if branch is None else _like(x), _like(x)


def _fake_norm_modulate_backward(
    total: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    grad_total: Tensor,
    grad_modulated: Tensor,
    first: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = _like(scale, 0) if bias is None else _like(bias)
    return _like(total), _like(scale, 2, *scale.shape), grad_bias


def _fake_add_gated(
    x: Tensor, gate: Tensor, branch: Tensor, bias: Tensor | None, first: int, rows: int
) -> Tensor:
    return _like(x)


def _fake_add_gated_backward(
    gate: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    grad_total: Tensor,
    other: Tensor | None,
    first: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_gate = _like(gate, 0) if branch is None else _like(gate)
    grad_bias = _like(gate, 0) if bias is None else _like(bias)
    grad = _like(grad_total, 0) if other is None else _like(grad_total)
    return grad_gate, _like(grad_total), grad_bias, grad


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
        bias: Tensor | None,
        shift: Tensor,
        scale: Tensor,
        first: int,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        total, modulated = norm_modulate_forward(x, branch, bias, shift, scale, first, rows)
        if branch is None:
            total = x.view_as(x)
        ctx.save_for_backward(total, scale, bias)
        ctx.adds, ctx.rows = branch is not None, (first, rows)
        return total, modulated

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_modulated: Tensor) -> tuple[Tensor | None, ...]:
        total, scale, bias = ctx.saved_tensors
        grad, entries, grad_bias = norm_modulate_backward(
            total, scale, bias, grad_total, grad_modulated, *ctx.rows
        )
        of_bias = None if bias is None else grad_bias
        return grad, grad if ctx.adds else None, of_bias, *entries.unbind(), None, None


class _AddGated(torch.autograd.Function):
    """The gradient of x is that of the sum. With ``twice`` there are two, which backward adds."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        branch: Tensor,
        bias: Tensor | None,
        first: int,
        rows: int,
        twice: bool,
    ) -> Any:
        # A frozen gate and bias, as under LoRA, need no branch.
        _, of_gate, _, of_bias, *_ = ctx.needs_input_grad
        ctx.save_for_backward(gate, *((branch, bias) if of_gate or of_bias else (None, None)))
        ctx.rows = (first, rows)
        total = add_gated_forward(x, gate, branch, bias, first, rows)
        return (total, total.view_as(total)) if twice else total

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor, other: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        gate, branch, bias = ctx.saved_tensors
        grad_gate, grad_branch, grad_bias, grad = add_gated_backward(
            gate, branch, bias, grad_total, other, *ctx.rows
        )
        of_x = grad_total if other is None else grad
        of_gate = None if branch is None else grad_gate
        of_bias = None if bias is None else grad_bias
        return of_x, of_gate, grad_branch, of_bias, None, None, None


def norm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """See ``reference/modulation.py``."""
    return _NormModulate.apply(x, None, None, shift, scale, *_numbers(part))


def add_norm_modulate(
    x: Tensor,
    branch: Tensor,
    shift: Tensor,
    scale: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference/modulation.py``."""
    return _NormModulate.apply(x, branch, bias, shift, scale, *_numbers(part))


def add_gated(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See ``reference/modulation.py``."""
    return _AddGated.apply(x, gate, branch, bias, *_numbers(part), False)


def add_gated_twice(
    x: Tensor,
    gate: Tensor,
    branch: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference/modulation.py``."""
    return _AddGated.apply(x, gate, branch, bias, *_numbers(part), True)


def _numbers(part: Part | None) -> tuple[int, int]:
    """Arguments ``first`` and ``rows`` of the operators; no rows stand for whole samples."""
    return (0, 0) if part is None else (part.first, part.rows)
