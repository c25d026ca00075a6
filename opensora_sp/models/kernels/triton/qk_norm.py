"""RMS norm and rotation of queries and keys in one pass, and their gradients in another.

Both read queries and keys where the product of queries, keys and values left them, and values stay
there. In activations of a token (C numbers): forward reads 2 and writes 2. Backward reads 5, the
three gradients and the queries and keys, and writes 3, the gradient of the product. The product is
kept for backward (3), in addition to the queries and keys that the attention keeps (2). Backward
also sums the gradient of the bias of the linear layer that made the product.

They are not written over the product. Backward needs them as they were: dividing the weight out
again fails where it is zero, and after the rotation a channel carries the rounding errors of its
neighbour. Recomputation, too, needs the product as it was.

Legend: R rows, L tokens of a row, H heads, D head width, N = R * L * H vectors of D numbers.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .operator import opaque_operator
from .sums import sum_parts

# Of each tensor, that a program holds at a time.
TILE_BYTES = 4096
# Programs of backward: four for each multiprocessor of an H100.
MAX_PARTS = 528


def qk_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rotation: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels/fused.py``."""
    return _QKNorm.apply(qkv, k_weight, q_weight, None, rotation, eps)


def linear_qk_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotation: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels/fused.py``."""
    # The product adds the bias, which costs nothing. Its gradient comes from the norms' backward.
    qkv = F.linear(x, weight, bias.detach()).unflatten(-1, (3, -1, len(q_weight)))
    return _QKNorm.apply(qkv, k_weight, q_weight, bias, rotation, eps)


class _QKNorm(torch.autograd.Function):
    """Returns values as a view, which operators cannot, so that one gradient of ``qkv`` is made.

    The weight of the keys comes first. Its gradient then comes before the queries' one, as from the
    reference: ZeRO sums gradients in the order in which they come.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        k_weight: Tensor,
        q_weight: Tensor,
        bias: Tensor | None,
        rotation: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.eps, ctx.has_bias = eps, bias is not None
        ctx.save_for_backward(qkv, q_weight, k_weight, rotation)
        q, k = _qk_norm(qkv, q_weight, k_weight, rotation, eps)
        return q, k, qkv.select(2, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_qkv, sums = _qk_norm_backward(*grads, *ctx.saved_tensors, ctx.eps, ctx.has_bias)
        width = grad_qkv.shape[-1]
        grad_q_weight, grad_k_weight, grad_bias = sums[:width], sums[width : 2 * width], None
        if ctx.has_bias:
            grad_bias = sums[2 * width :]
        return grad_qkv, grad_k_weight, grad_q_weight, grad_bias, None, None


def _forward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rotation: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    q, k = _fake_forward(qkv, q_weight, k_weight, rotation, eps)
    call = _arguments(qkv, rotation)
    if q.numel():
        grid = (triton.cdiv(call["num_vectors"], call["VECTORS"]),)
        _forward_kernel[grid](qkv.contiguous(), q_weight, k_weight, q, k, eps, **call)
    return q, k


def _fake_forward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rotation: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(qkv.dtype, q_weight.dtype)
    rows, length, _, heads, width = qkv.shape
    q = qkv.new_empty(rows, length, heads, width, dtype=dtype)
    return q, torch.empty_like(q)


def _backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotation: Tensor | None,
    eps: float,
    has_bias: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of ``qkv``; and, in one tensor ``[D + D + 3 * H * D]``, the gradients of the
    weights of queries and keys and, if ``has_bias``, of the bias of ``qkv``."""
    call = _arguments(qkv, rotation)
    qkv = qkv.contiguous()
    grad_qkv = torch.empty_like(qkv)

    # All heads of a token, or of several, so that sums over tokens stay where they are.
    heads = triton.next_power_of_2(call["HEADS"])
    call["VECTORS"] = vectors = max(call["VECTORS"], heads)
    # Of 4 warps, each thread would take up to 255 registers, and with some compilers spill.
    call |= dict(
        TOKENS=vectors // heads, HAS_BIAS=has_bias, num_warps=min(16, max(8, vectors // 4))
    )
    parts = min(MAX_PARTS, triton.cdiv(call["num_vectors"], call["HEADS"] * call["TOKENS"]))

    wide = torch.promote_types(qkv.dtype, torch.float32)
    sums = qkv.new_empty(parts, _num_sums(qkv, has_bias), dtype=wide)
    if parts:
        grads = [_by_token(grad) for grad in (grad_q, grad_k, grad_v)]
        steps = [grad.stride(0) for grad in grads]
        _backward_kernel[(parts,)](
            *grads, *steps, qkv, q_weight, k_weight, grad_qkv, sums, eps, **call
        )
    return grad_qkv, sum_parts(sums, q_weight.dtype)


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor]:
    _, _, _, qkv, q_weight, _, _, _, has_bias = args
    return qkv.new_empty(qkv.shape), q_weight.new_empty(_num_sums(qkv, has_bias))


def _num_sums(qkv: Tensor, has_bias: bool) -> int:
    heads, width = qkv.shape[-2:]
    return 2 * width + (3 * heads * width if has_bias else 0)


_qk_norm = opaque_operator("qk_norm", _forward, _fake_forward)
_qk_norm_backward = opaque_operator("qk_norm_backward", _backward, _fake_backward)


def _by_token(grad: Tensor) -> Tensor:
    """``[R, L, H, D]`` -> ``[R * L, H * D]``, the numbers of a token next to each other."""
    grad = grad.reshape(-1, grad.shape[2] * grad.shape[3])
    return grad if grad.stride(1) == 1 else grad.contiguous()


def _arguments(qkv: Tensor, rotation: Tensor | None) -> dict[str, Any]:
    """What the kernels of forward and backward share."""
    rows, length, _, heads, width = qkv.shape
    block = triton.next_power_of_2(width)
    rotated_rows, positions = (1, 1) if rotation is None else rotation.shape[1:3]
    return dict(
        rotation=None if rotation is None else rotation.contiguous(),
        # From one row, or one position, to the next and from cosines to sines, in vectors.
        row_step=positions if rotated_rows > 1 else 0,
        position_step=1 if positions > 1 else 0,
        sine_step=rotated_rows * positions,
        length=length,
        num_vectors=rows * length * heads,
        HEADS=heads,
        WIDTH=width,
        BLOCK=block,
        VECTORS=max(1, TILE_BYTES // (block * qkv.element_size())),
        WIDE=tl.float64 if qkv.dtype == torch.float64 else tl.float32,
    )


SIZES = ["row_step", "position_step", "sine_step", "length", "num_vectors"]


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    qkv,
    q_weight,
    k_weight,
    q,
    k,
    eps,
    rotation,
    row_step,
    position_step,
    sine_step,
    length,
    num_vectors,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDE: tl.constexpr,
):
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    column = tl.arange(0, BLOCK)
    mask = (vector < num_vectors)[:, None] & (column < WIDTH)[None, :]
    token, head = vector // HEADS, vector % HEADS
    at_q = _offsets(token, 3 * HEADS * WIDTH, head * WIDTH, column)
    at_k = at_q + HEADS * WIDTH

    x = _normed(tl.load(qkv + at_q, mask, other=0).to(WIDE), eps, WIDTH)
    y = _normed(tl.load(qkv + at_k, mask, other=0).to(WIDE), eps, WIDTH)
    x *= _weights(q_weight, column, WIDTH, VECTORS, WIDE)
    y *= _weights(k_weight, column, WIDTH, VECTORS, WIDE)
    if rotation is not None:
        at = _offsets(_position(token, length, row_step, position_step), WIDTH, 0, column)
        cosine = tl.load(rotation + at, mask, other=0).to(WIDE)
        sine = tl.load(rotation + sine_step * WIDTH + at, mask, other=0).to(WIDE)
        x = _rotated(x, cosine, sine)
        y = _rotated(y, cosine, sine)

    at = _offsets(vector, WIDTH, 0, column)
    tl.store(q + at, x.to(q.dtype.element_ty), mask)
    tl.store(k + at, y.to(k.dtype.element_ty), mask)


@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    grad_q,
    grad_k,
    grad_v,
    q_step,
    k_step,
    v_step,
    qkv,
    q_weight,
    k_weight,
    grad_qkv,
    sums,
    eps,
    rotation,
    row_step,
    position_step,
    sine_step,
    length,
    num_vectors,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTORS: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Each program takes every n-th tile, and adds up its gradients of the weights."""
    column = tl.arange(0, BLOCK)
    q_weights = _weights(q_weight, column, WIDTH, VECTORS, WIDE)
    k_weights = _weights(k_weight, column, WIDTH, VECTORS, WIDE)
    q_total = tl.zeros([VECTORS, BLOCK], WIDE)
    k_total = tl.zeros([VECTORS, BLOCK], WIDE)
    dq_total = tl.zeros([VECTORS, BLOCK], WIDE)
    dk_total = tl.zeros([VECTORS, BLOCK], WIDE)
    dv_total = tl.zeros([VECTORS, BLOCK], WIDE)

    PADDED: tl.constexpr = VECTORS // TOKENS  # heads
    number = tl.arange(0, VECTORS)
    head = number % PADDED * WIDTH
    inside = (head < HEADS * WIDTH)[:, None] & (column < WIDTH)[None, :]
    num_tokens = num_vectors // HEADS

    for start in range(tl.program_id(0) * TOKENS, num_tokens, tl.num_programs(0) * TOKENS):
        token = start + number // PADDED
        mask = (token < num_tokens)[:, None] & inside
        dx = tl.load(grad_q + _offsets(token, q_step, head, column), mask, other=0).to(WIDE)
        dy = tl.load(grad_k + _offsets(token, k_step, head, column), mask, other=0).to(WIDE)
        dv = tl.load(grad_v + _offsets(token, v_step, head, column), mask, other=0)

        if rotation is not None:
            at = _offsets(_position(token, length, row_step, position_step), WIDTH, 0, column)
            cosine = tl.load(rotation + at, mask, other=0).to(WIDE)
            sine = tl.load(rotation + sine_step * WIDTH + at, mask, other=0).to(WIDE)
            # Back: the transpose of a rotation is its inverse.
            dx = _rotated(dx, cosine, -sine)
            dy = _rotated(dy, cosine, -sine)

        at_q = _offsets(token, 3 * HEADS * WIDTH, head, column)
        at_k, at_v = at_q + HEADS * WIDTH, at_q + 2 * HEADS * WIDTH
        x = tl.load(qkv + at_q, mask, other=0).to(WIDE)
        y = tl.load(qkv + at_k, mask, other=0).to(WIDE)
        q_total += dx * _normed(x, eps, WIDTH)
        k_total += dy * _normed(y, eps, WIDTH)
        dx = _norm_gradient(dx * q_weights, x, eps, WIDTH)
        dy = _norm_gradient(dy * k_weights, y, eps, WIDTH)

        if HAS_BIAS:
            dq_total += dx
            dk_total += dy
            dv_total += dv.to(WIDE)
        tl.store(grad_qkv + at_q, dx.to(grad_qkv.dtype.element_ty), mask)
        tl.store(grad_qkv + at_k, dy.to(grad_qkv.dtype.element_ty), mask)
        tl.store(grad_qkv + at_v, dv.to(grad_qkv.dtype.element_ty), mask)

    part = sums + tl.program_id(0) * (2 + 3 * HEADS * HAS_BIAS) * WIDTH
    tl.store(part + column, tl.sum(q_total, 0), column < WIDTH)
    tl.store(part + WIDTH + column, tl.sum(k_total, 0), column < WIDTH)
    if HAS_BIAS:
        _store_bias(part + 2 * WIDTH, dq_total, dk_total, dv_total, HEADS, WIDTH, TOKENS)


@triton.jit
def _store_bias(part, dq, dk, dv, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """Sums over the tokens of tiles ``[TOKENS * heads, BLOCK]``, for the biases of q, k and v."""
    head = tl.arange(0, dq.shape[0] // TOKENS) * WIDTH
    column = tl.arange(0, dq.shape[1])
    inside = (head < HEADS * WIDTH)[:, None] & (column < WIDTH)[None, :]
    place = part + head[:, None] + column[None, :]
    tl.store(place, _over_tokens(dq, TOKENS), inside)
    tl.store(place + HEADS * WIDTH, _over_tokens(dk, TOKENS), inside)
    tl.store(place + 2 * HEADS * WIDTH, _over_tokens(dv, TOKENS), inside)


@triton.jit
def _over_tokens(total, TOKENS: tl.constexpr):
    """Sums of a tile ``[TOKENS * heads, BLOCK]`` over its tokens."""
    return tl.sum(total.reshape([TOKENS, total.shape[0] // TOKENS, total.shape[1]]), 0)


@triton.jit
def _position(token, length, row_step, position_step):
    """The vector of a token in the table of rotations."""
    return token // length * row_step + token % length * position_step


@triton.jit
def _offsets(index, step, start, column):
    """Of a tile, one row for each index."""
    return (index.to(tl.int64) * step + start)[:, None] + column[None, :]


@triton.jit
def _weights(weight, column, WIDTH: tl.constexpr, VECTORS: tl.constexpr, WIDE: tl.constexpr):
    at = tl.broadcast_to(column[None, :], [VECTORS, column.shape[0]])
    return tl.load(weight + at, at < WIDTH, other=0).to(WIDE)


@triton.jit
def _inverse_rms(x, eps, WIDTH: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]


@triton.jit
def _normed(x, eps, WIDTH: tl.constexpr):
    return x * _inverse_rms(x, eps, WIDTH)


@triton.jit
def _norm_gradient(grad, x, eps, WIDTH: tl.constexpr):
    """The gradient of x, from the gradient of ``x / rms``."""
    inverse = _inverse_rms(x, eps, WIDTH)
    normed = x * inverse
    mean = tl.sum(grad * normed, 1)[:, None] / WIDTH
    return (grad - normed * mean) * inverse


@triton.jit
def _rotated(x, cosine, sine):
    """Pairs of neighbouring channels, rotated; ``sine`` is negated for the first of a pair."""
    first, second = tl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    swapped = tl.join(second, first).reshape(x.shape)
    return x * cosine + swapped * sine
