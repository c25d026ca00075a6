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

Legend: as in ``kernels/fused.py``; N entries of a table ``[N, C]``.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fused import EPSILON, Part
from .modulation_kernels import (
    add_gated_backward_kernel,
    add_gated_kernel,
    add_pieces_kernel,
    norm_modulate_backward_kernel,
    norm_modulate_kernel,
)
from .operator import opaque_operator
from .sums import COLUMNS, ROWS

TOKENS = 4  # of a program in forward

# Shares of backward's programs. GPUs run 528 of them at a time (H100 SXM), 456 (H100 PCIe) or 432
# (A100). Bits depend on the order of sums, so the number of programs does not depend on the GPU.
# 432 large shares take what 528 equal ones would; smaller ones fill the slots that remain, or
# follow on a GPU without any: on each of the three, all slots end at about the same time.
SLOTS, LARGE_PROGRAMS, SMALL_PROGRAMS = 528, 432, 384


class _Shares(NamedTuple):
    """How tokens are distributed over entries and programs; the fields are the kernels' ``COUNTS``.

    Attributes:
        length: L.
        shared_rows, shared_length: rows, and tokens in each of them, that share an entry.
        first, local_rows: the local rows, counted from the first sample's first row.
        large_programs, large, small: the number of programs with a large share, and the tokens in
            a large share and in a small one.
    """

    length: int
    shared_rows: int
    shared_length: int
    first: int
    local_rows: int
    large_programs: int
    large: int
    small: int

    @property
    def programs(self) -> int:
        remaining = self.length * self.local_rows - self.large_programs * self.large
        return self.large_programs + triton.cdiv(max(0, remaining), self.small)

    @property
    def local_entries(self) -> int:
        """Number of entries, from the first local row's to the last local row's."""
        first_group = self.first // self.shared_rows
        end_group = triton.cdiv(self.first + self.local_rows, self.shared_rows)
        return (end_group - first_group) * (self.length // self.shared_length)


def _shares(x: Tensor, entry: Tensor, first: int, rows: int, *, backward: bool) -> _Shares:
    rows, length = rows or len(x) // len(entry), x.shape[1]
    programs = _backward_programs if backward else _forward_programs
    return _Shares(
        length,
        rows // entry.shape[1],
        length // entry.shape[2],
        first,
        len(x),
        *programs(len(x) * length),
    )


def _forward_programs(tokens: int) -> tuple[int, int, int]:
    return triton.cdiv(tokens, TOKENS), TOKENS, 1


def _backward_programs(tokens: int) -> tuple[int, int, int]:
    """The last three fields of ``_Shares``."""
    large = triton.cdiv(tokens, SLOTS)
    large_programs = min(LARGE_PROGRAMS, triton.cdiv(tokens, large))
    remaining = max(0, tokens - large_programs * large)
    return large_programs, large, max(1, triton.cdiv(remaining, SMALL_PROGRAMS))


def _constants(x: Tensor) -> dict[str, Any]:
    """What the kernels for tokens such as x are compiled for."""
    # At a width of 1,152, 44 % of the lanes of a block of 2,048 are idle. Blocks of 1,024 and 128
    # would take 114 registers in backward, not 128, but load the tail 16 bits at a time, and each
    # line of the kernels would be there twice.
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
    total, modulated = _fake_norm_modulate(x, branch)
    if not x.numel():
        return total, modulated

    shifts, scales = _tables(shift, scale)
    shares = _shares(x, shift, first, rows, backward=False)
    norm_modulate_kernel[shares.programs,](
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
    grad, grad_entries, grad_bias = _fake_norm_modulate_backward(total, scale, bias)
    if not total.numel():
        return grad, grad_entries.zero_(), grad_bias.zero_()

    (scales,) = _tables(scale)
    shares = _shares(total, scale, first, rows, backward=True)
    sums, bias_sums = _empty_sums(grad_entries, grad_bias, shares)
    norm_modulate_backward_kernel[shares.programs,](
        *_with_steps(total),
        scales,
        *_with_steps(grad_total),
        grad_modulated.contiguous(),
        grad,
        sums,
        bias_sums,
        scales.stride(0),
        *shares,
        EPS=EPSILON,
        **_constants(total),
    )
    _add_pieces(sums, bias_sums, grad_entries, grad_bias, shares)
    return grad, grad_entries, grad_bias


def _add_gated(
    x: Tensor, gate: Tensor, branch: Tensor, bias: Tensor | None, first: int, rows: int
) -> Tensor:
    total = _like(x)
    if x.numel():
        (gates,) = _tables(gate)
        shares = _shares(x, gate, first, rows, backward=False)
        add_gated_kernel[shares.programs,](
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

    Empty tensors stand for gradients that are not computed: of a gate without the branch, of a
    bias that is None, and the sum without a second gradient of the total.
    """
    grad_gate, grad_branch, grad_bias, grad = _fake_add_gated_backward(
        gate, branch, bias, grad_total, other
    )
    if not grad_total.numel():
        return grad_gate.zero_(), grad_branch, grad_bias.zero_(), grad

    (gates,) = _tables(gate)
    shares = _shares(grad_total, gate, first, rows, backward=True)
    sums, bias_sums = None, None
    if branch is not None:
        sums, bias_sums = _empty_sums(grad_gate[None], grad_bias, shares)
    add_gated_backward_kernel[shares.programs,](
        gates,
        branch.contiguous() if branch is not None else None,
        bias,
        *_with_steps(grad_total),
        other.contiguous() if other is not None else None,
        grad if other is not None else None,
        grad_branch,
        sums,
        bias_sums,
        gates.stride(0),
        *shares,
        **_constants(grad_total),
    )
    if sums is not None:
        _add_pieces(sums, bias_sums, grad_gate[None], grad_bias, shares)
    return grad_gate, grad_branch, grad_bias, grad


def _empty_sums(total: Tensor, grad_bias: Tensor, shares: _Shares) -> tuple[Tensor, Tensor | None]:
    """For the sums of pieces ``[P, kinds, C]``, and for the bias, if any, the sums of programs."""
    wide, width = torch.promote_types(total.dtype, torch.float32), total.shape[-1]
    pieces = shares.programs + shares.local_entries
    sums = total.new_empty(pieces, len(total), width, dtype=wide)
    if not grad_bias.numel():
        return sums, None
    return sums, total.new_empty(shares.programs, width, dtype=wide)


def _add_pieces(
    sums: Tensor, bias_sums: Tensor | None, total: Tensor, grad_bias: Tensor, shares: _Shares
) -> None:
    """Write the gradients of entries, ``[kinds, b, 1 or n, 1 or L, C]``, and of the bias."""
    kinds, width = sums.shape[1:]
    rows = total.numel() // width
    grid = (triton.cdiv(width, COLUMNS) * (rows + (bias_sums is not None)),)
    add_pieces_kernel[grid](
        sums,
        bias_sums,
        total,
        grad_bias,
        rows // kinds,
        shares.programs,
        *shares,
        KINDS=kinds,
        WIDTH=width,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )


def _fake_norm_modulate(x: Tensor, branch: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(x, 0) if branch is None else _like(x), _like(x)


def _fake_norm_modulate_backward(
    total: Tensor, scale: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = _like(scale, 0) if bias is None else _like(bias)
    return _like(total), _like(scale, 2, *scale.shape), grad_bias


def _fake_add_gated_backward(
    gate: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    grad_total: Tensor,
    other: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_gate = _like(gate, 0) if branch is None else _like(gate)
    grad_bias = _like(gate, 0) if bias is None else _like(bias)
    grad = _like(grad_total, 0) if other is None else _like(grad_total)
    return grad_gate, _like(grad_total), grad_bias, grad


norm_modulate_forward = opaque_operator("norm_modulate", _norm_modulate, _fake_norm_modulate)
norm_modulate_backward = opaque_operator(
    "norm_modulate_backward", _norm_modulate_backward, _fake_norm_modulate_backward
)
add_gated_forward = opaque_operator("add_gated", _add_gated, lambda x, *_: _like(x))
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
        return (
            grad,
            grad if ctx.adds else None,
            None if bias is None else grad_bias,
            *entries.unbind(),
            None,
            None,
        )


class _AddGated(torch.autograd.Function):
    """The gradient of x is the gradient of the sum. With ``twice``, backward adds two of these."""

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
        _, gate_is_trained, _, bias_is_trained, *_ = ctx.needs_input_grad
        if gate_is_trained or bias_is_trained:
            ctx.save_for_backward(gate, branch, bias)
        else:
            ctx.save_for_backward(gate, None, None)
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
        return (
            grad_total if other is None else grad,
            None if branch is None else grad_gate,
            grad_branch,
            None if bias is None else grad_bias,
            None,
            None,
            None,
        )


def norm_modulate(
    x: Tensor, shift: Tensor, scale: Tensor, part: Part | None = None
) -> tuple[Tensor, Tensor]:
    """See ``kernels/fused.py``."""
    return add_norm_modulate(x, None, shift, scale, part)


def add_norm_modulate(
    x: Tensor,
    branch: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    part: Part | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``kernels/fused.py``."""
    return _NormModulate.apply(x, branch, bias, shift, scale, *_numbers(part))


def add_gated(
    x: Tensor, gate: Tensor, branch: Tensor, part: Part | None = None, bias: Tensor | None = None
) -> Tensor:
    """See ``kernels/fused.py``."""
    return _AddGated.apply(x, gate, branch, bias, *_numbers(part), False)


def add_gated_twice(
    x: Tensor, gate: Tensor, branch: Tensor, part: Part | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``kernels/fused.py``."""
    return _AddGated.apply(x, gate, branch, bias, *_numbers(part), True)


def _numbers(part: Part | None) -> tuple[int, int]:
    """Arguments ``first`` and ``rows`` of the operators; no rows stand for whole samples."""
    return (0, 0) if part is None else (part.first, part.rows)
