"""Softmax attention over rows of at most 32 tokens, such as the frames of a patch.

Kernels for long rows fill tiles of 64 or 128 queries, mostly with padding here, and add the
queries' gradients in memory. Here a tile is one (row, head): T tokens, padded to 16 or 32. All of
it is on chip at once, so backward computes the softmax again and writes each gradient once: forward
reads q, k, v and writes the result (4 activations of a token), backward reads these three and the
result's gradient and writes three gradients (7). Nothing but q, k and v is kept for it.

A program computes several neighbouring pairs of a row and a head, which are close in memory: heads
first, then rows. Dots need powers of two, 16 or more, so channels are cut in two: a head of 72 is
64 + 8, padded to 64 + 16 instead of 128.

Legend: R rows, T tokens of a row, H heads, D head width; in kernels P pairs, L tokens with padding.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention_table import HEAD_WIDTHS, LENGTHS
from ..fused import INTERPRETED
from .operator import opaque_operator

IS_INTERPRETED = tl.constexpr(INTERPRETED)
LOG2_E = tl.constexpr(math.log2(math.e))

# Sizes and strides, of which nothing is compiled in.
INTEGERS = ["pairs", "T", "H"]
INTEGERS += [f"{z}_{axis}" for z in ("grad", "q", "k", "v") for axis in ("row", "token", "head")]


@triton.jit
def _product(a, b):
    """``a @ b`` of each pair, ``[P, m, k]`` and ``[P, k, n]``, summed in at least float32."""
    if a.dtype == tl.float64:
        # Only interpreted, in tests: dots take no float64.
        product = tl.sum(a[:, :, :, None] * b[:, None, :, :], axis=2)
    elif a.dtype == tl.float32:
        # Without batches; P is 1.
        a = tl.reshape(a, a.shape[1], a.shape[2])
        b = tl.reshape(b, b.shape[1], b.shape[2])
        product = tl.dot(a, b, input_precision="ieee")[None, :, :]
    elif IS_INTERPRETED:
        # The interpreter's dots take no bfloat16.
        product = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        product = tl.dot(a, b)
    return product


@triton.jit
def _transpose(a):
    return tl.trans(a, 0, 2, 1)


@triton.jit
def _pairs(T, H, pairs, P: tl.constexpr, L: tl.constexpr):
    """The row, head and token of each place of this program, and whether it has one.

    ``[P, 1, 1]``, ``[P, 1, 1]``, ``[1, L, 1]`` and ``[P, L, 1]``. Offsets may exceed 2^31.
    """
    pair = tl.program_id(0) * P + tl.arange(0, P)[:, None, None]
    token = tl.arange(0, L)[None, :, None]
    row, head = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    return row, head, token.to(tl.int64), (pair < pairs) & (token < T)


@triton.jit
def _load(start, exists, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The first and the last channels of tokens that start at pointers; zeros where none are."""
    low = tl.arange(0, LOW)[None, None, :]
    high = LOW + tl.arange(0, HIGH)[None, None, :]
    first = tl.load(start + low, mask=exists & (low < D), other=0.0)
    last = tl.load(start + high, mask=exists & (high < D), other=0.0)
    return first, last


@triton.jit
def _store(start, exists, first, last, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    low = tl.arange(0, LOW)[None, None, :]
    high = LOW + tl.arange(0, HIGH)[None, None, :]
    tl.store(start + low, first, mask=exists & (low < D))
    tl.store(start + high, last, mask=exists & (high < D))


@triton.jit
def _weights(q_first, q_last, k_first, k_last, T, D: tl.constexpr, L: tl.constexpr):
    """The softmax of the scores, ``[P, L, L]``."""
    scores = _product(q_first, _transpose(k_first)) + _product(q_last, _transpose(k_last))
    scale = tl.full((1, 1, 1), LOG2_E / D**0.5, scores.dtype)
    is_key = tl.arange(0, L)[None, None, :] < T
    scores = tl.where(is_key, scores * scale, float("-inf"))

    weights = tl.exp2(scores - tl.max(scores, axis=2, keep_dims=True))
    return weights / tl.sum(weights, axis=2, keep_dims=True)


# One binary for each dtype, head width, alignment and padding: no other number is compiled in.
@triton.jit(do_not_specialize=INTEGERS)
def _short_rows_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    pairs,
    T,
    H,
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
):
    """Strides are in units of ALIGNED numbers, so that the compiler knows what divides them."""
    row, head, token, exists = _pairs(T, H, pairs, P, L)
    q = q_ptr + (row * q_row + token * q_token + head * q_head) * ALIGNED
    k = k_ptr + (row * k_row + token * k_token + head * k_head) * ALIGNED
    v = v_ptr + (row * v_row + token * v_token + head * v_head) * ALIGNED
    q_first, q_last = _load(q, exists, D, LOW, HIGH)
    k_first, k_last = _load(k, exists, D, LOW, HIGH)
    v_first, v_last = _load(v, exists, D, LOW, HIGH)

    weights = _weights(q_first, q_last, k_first, k_last, T, D, L).to(v_first.dtype)
    first, last = _product(weights, v_first), _product(weights, v_last)
    out = out_ptr + ((row * T + token) * H + head) * D
    _store(out, exists, first, last, D, LOW, HIGH)


@triton.jit(do_not_specialize=INTEGERS)
def _short_rows_backward(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_v_ptr,
    pairs,
    T,
    H,
    grad_row,
    grad_token,
    grad_head,
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
):
    """With weights W and the result's gradient G, of a pair::

    grad_v = W^T G      A = G v^T
    S = W * (A - sum of W * A over keys) / sqrt(D)
    grad_q = S k        grad_k = S^T q
    """
    row, head, token, exists = _pairs(T, H, pairs, P, L)
    q = q_ptr + (row * q_row + token * q_token + head * q_head) * ALIGNED
    k = k_ptr + (row * k_row + token * k_token + head * k_head) * ALIGNED
    v = v_ptr + (row * v_row + token * v_token + head * v_head) * ALIGNED
    grad = grad_ptr + (row * grad_row + token * grad_token + head * grad_head) * ALIGNED
    q_first, q_last = _load(q, exists, D, LOW, HIGH)
    k_first, k_last = _load(k, exists, D, LOW, HIGH)
    grad_first, grad_last = _load(grad, exists, D, LOW, HIGH)
    written = ((row * T + token) * H + head) * D

    weights = _weights(q_first, q_last, k_first, k_last, T, D, L)
    turned = _transpose(weights.to(q_first.dtype))
    first, last = _product(turned, grad_first), _product(turned, grad_last)
    _store(grad_v_ptr + written, exists, first, last, D, LOW, HIGH)

    # Loaded before, values would take registers that are needed until here.
    v_first, v_last = _load(v, exists, D, LOW, HIGH)
    by_weight = _product(grad_first, _transpose(v_first)) + _product(grad_last, _transpose(v_last))
    mean = tl.sum(weights * by_weight, axis=2, keep_dims=True)
    scale = tl.full((1, 1, 1), 1 / D**0.5, weights.dtype)
    by_score = (weights * (by_weight - mean) * scale).to(q_first.dtype)
    first, last = _product(by_score, k_first), _product(by_score, k_last)
    _store(grad_q_ptr + written, exists, first, last, D, LOW, HIGH)

    turned = _transpose(by_score)
    first, last = _product(turned, q_first), _product(turned, q_last)
    _store(grad_k_ptr + written, exists, first, last, D, LOW, HIGH)


def attend_short_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See ``kernels/fused.py``."""
    return _ShortRows.apply(q, k, v)


def _forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = _fake(q)
    _launch(_short_rows_forward, (q, k, v), (out,))
    return out


def _backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grads = _fake_backward(grad_out)
    _launch(_short_rows_backward, (grad_out, q, k, v), grads)
    return grads


def _fake(q: Tensor, *_: Tensor) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _fake_backward(grad_out: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _fake(grad_out), _fake(grad_out), _fake(grad_out)


def _launch(kernel: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """``inputs`` may be strided in all dims but the last, ``outputs`` are contiguous."""
    rows, length, heads, width = inputs[0].shape
    assert length in LENGTHS and width in HEAD_WIDTHS, inputs[0].shape
    assert len({(z.shape, z.dtype) for z in inputs}) == 1, [(z.shape, z.dtype) for z in inputs]
    if not rows * heads:
        return

    inputs = tuple(z if z.stride(-1) == 1 else z.contiguous() for z in inputs)
    strides = [stride for z in inputs for stride in z.stride()[:-1]]
    aligned = math.gcd(16 // inputs[0].element_size(), *strides)
    constants = _constants(length, width, inputs[0].dtype)

    grid = (triton.cdiv(rows * heads, constants["P"]),)
    kernel[grid](
        *inputs,
        *outputs,
        rows * heads,
        length,
        heads,
        *(stride // aligned for stride in strides),
        ALIGNED=aligned,
        D=width,
        **constants,
    )


def _constants(length: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """How much a program computes: P pairs of L tokens with LOW + HIGH channels."""
    padded = 16 if length <= 16 else 32
    low = max(16, triton.next_power_of_2(width) // 2)
    high = max(16, triton.next_power_of_2(max(1, width - low)))

    # A warp for each pair, or two where registers of one would not suffice.
    pairs, warps = (4, 4) if padded * (low + high) <= 32 * 80 else (2, 4)
    if dtype == torch.float32:
        pairs, warps = 1, 8
    return dict(L=padded, LOW=low, HIGH=high, P=pairs, num_warps=warps)


short_rows_forward = opaque_operator("short_rows", _forward, _fake)
short_rows_backward = opaque_operator("short_rows_backward", _backward, _fake_backward)


class _ShortRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return short_rows_forward(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return short_rows_backward(grad, *ctx.saved_tensors)
