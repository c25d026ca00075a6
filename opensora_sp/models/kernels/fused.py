"""Fused kernels: each function is written in plain torch, and may run a Triton kernel instead.

``chosen`` decides which; on a CPU it is always plain torch. ``triton/`` has a module for each
kernel, with functions of the same names, and is imported only where one is chosen.

Entries of a modulation are ``[b, 1 or n, 1 or L, C]``: of b samples of n rows, for each sample, for
each of its rows or for each token of a row. Tokens ``[R, L, C]`` are all these rows, or a ``part``
of them. Results have the dtype of ``x``; entries may be wider.

Legend: R rows, L tokens of a row, C width, H heads, D head width, F width of the hidden layer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functions import normalize, rotate

Kernels = Literal["auto", "triton", "torch"]

# Triton's interpreter runs kernels on the CPU, for tests. Triton reads this when it is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Of the LayerNorm.
EPSILON = 1e-6

# Plain objects: torch.compile makes guards of what it reads here, and compiles again if it changes.
_setting: Kernels = "auto"
_verified: dict[str, tuple[torch.dtype, ...]] = {}


def set_kernels(kernels: Kernels) -> None:
    """Set which kernels this process uses from now on.

    Args:
        kernels: "auto" takes Triton kernels on CUDA that were verified on this device
            (``opensora_sp.device_verification``), "triton" takes them without verification,
            "torch" takes none. Tensors in float64, which no Triton kernel computes, always take
            plain torch; ``check_kernels`` refuses "triton" for them.

    Raises:
        ValueError: for another name.
    """
    global _setting
    if kernels not in get_args(Kernels):
        raise ValueError(
            f"got kernels {kernels!r}; expected one of {', '.join(map(repr, get_args(Kernels)))}; "
            "correct it"
        )
    _setting = kernels


def check_kernels(kernels: str, device_type: str, dtype: torch.dtype) -> None:
    """Raise ValueError where ``kernels="triton"`` is asked for, and no Triton kernel would run."""
    runs = dtype != torch.float64 if device_type == "cuda" else INTERPRETED
    if kernels == "triton" and not runs:
        raise ValueError(
            f"got kernels='triton' for {dtype} on a device of type {device_type!r}; expected "
            "torch.float32, torch.bfloat16 or torch.float16 on a CUDA device, for which Triton "
            "compiles kernels that compute in float32; set kernels='auto' or 'torch'"
        )


def current_kernels() -> Kernels:
    """The setting of ``set_kernels``."""
    return _setting


@contextmanager
def using_kernels(kernels: Kernels) -> Iterator[None]:
    """``set_kernels`` for the time of a ``with`` statement."""
    before = _setting
    set_kernels(kernels)
    try:
        yield
    finally:
        set_kernels(before)


def set_verified(name: str, dtypes: Iterable[torch.dtype]) -> None:
    """Set for which dtypes "auto" may take a Triton kernel."""
    _verified[name] = tuple(dtypes)


def chosen(name: str, like: Tensor) -> bool:
    """True if the Triton kernel of this name runs for tensors such as ``like``."""
    if _setting == "torch":
        return False

    # Fake tensors have the device that they stand for. Meta tensors stand for tensors of a GPU; the
    # planner traces its operators.
    if not (like.is_cuda or like.is_meta):
        return INTERPRETED and _setting == "triton" and like.device.type == "cpu"

    if like.dtype == torch.float64:
        return False
    return _setting == "triton" or like.dtype in _verified.get(name, ())


def _modulation() -> Any:
    """The Triton kernels, whose imports take a second and fail where Triton is not installed."""
    from .triton import modulation

    return modulation


def _qk_norm() -> Any:
    from .triton import qk_norm

    return qk_norm


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
    if chosen("modulation", x):
        return _modulation().norm_modulate(x, shift, scale, part)

    shift, scale = _row_entries(shift, x, part), _row_entries(scale, x, part)
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
    """``x + branch``, and this sum normalized and modulated.

    Args:
        bias: ``[C]``, the bias of the branch's last layer, if it was left out there.
    """
    if chosen("modulation", x):
        return _modulation().add_norm_modulate(x, branch, shift, scale, part, bias)

    branch = branch if bias is None else branch + bias
    return norm_modulate((x + branch).to(x.dtype), shift, scale, part)


def add_gated(
    x: Tensor, gate: Tensor, branch: Tensor, part: Part | None = None, bias: Tensor | None = None
) -> Tensor:
    """``x + gate * branch``; ``bias`` as in ``add_norm_modulate``."""
    if chosen("modulation", x):
        return _modulation().add_gated(x, gate, branch, part, bias)

    branch = branch if bias is None else branch + bias
    gate = _row_entries(gate, x, part)
    total = torch.addcmul(_by_sample(x, gate), gate, _by_sample(branch, gate))
    return total.flatten(0, 1).to(x.dtype)


def add_gated_twice(
    x: Tensor, gate: Tensor, branch: Tensor, part: Part | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``add_gated`` for two callers: backward gets both gradients, and adds them on the way."""
    if chosen("modulation", x):
        return _modulation().add_gated_twice(x, gate, branch, part, bias)

    total = add_gated(x, gate, branch, part, bias)
    return total, total


def _row_entries(entry: Tensor, x: Tensor, part: Part | None) -> Tensor:
    """The entry of each row of a part, ``[1, R, 1 or L, C]``."""
    if part is None:
        return entry
    by_row = entry.expand(-1, part.rows, -1, -1).flatten(0, 1)
    return by_row[None, part.first : part.first + len(x)]


def _by_sample(x: Tensor, entry: Tensor) -> Tensor:
    """Tokens ``[R, L, C]`` as ``[b, n, L, C]``, against which an entry is broadcast."""
    return x.unflatten(0, (len(entry), len(x) // len(entry)))


def qk_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, rotation: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm queries and keys of each head (Zhang & Sennrich, 2019), then rotate them (Su et al.,
    2021).

    Args:
        qkv: ``[R, L, 3, H, D]``, queries, keys and values of each token, any floating dtype.
        q_weight, k_weight: of the norms, ``[D]``.
        rotation: ``[2, 1 or R, 1 or L, 1, D]``, cosine and sine for each channel, as in
            ``functions.rotate``; None leaves positions out.
        eps: added to the mean square, above zero.

    Returns:
        Queries, keys and values, ``[R, L, H, D]`` each. Values are a view of ``qkv``.
    """
    if chosen("qk_norm", qkv):
        return _qk_norm().qk_norm(qkv, q_weight, k_weight, rotation, eps)

    q, k, v = qkv.unbind(2)
    q, k = q_weight * normalize(q, eps), k_weight * normalize(k, eps)
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    return q, k, v


def linear_qk_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotation: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``qk_norm`` of a linear layer's result: x ``[R, L, C]``, ``weight`` ``[3 * H * D, C]``."""
    if chosen("qk_norm", x):
        return _qk_norm().linear_qk_norm(x, weight, bias, q_weight, k_weight, rotation, eps)

    qkv = F.linear(x, weight, bias).unflatten(-1, (3, -1, len(q_weight)))
    return qk_norm(qkv, q_weight, k_weight, rotation, eps)


def explicit_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``softmax(q k^T / sqrt(D)) v`` of each row and head by its definition, in at least float32.

    Args:
        q, k, v: ``[R, T, H, D]`` with any strides; keys and values may differ in T from queries.

    Returns:
        ``[R, T, H, D]`` in the dtype of ``q``.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("rqhd,rkhd->rhqk", q.to(wide) * q.shape[-1] ** -0.5, k.to(wide))
    return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(dim=-1), v.to(wide)).to(q.dtype)


def attend_short_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``explicit_softmax`` in the dtype of ``v``; at most 32 tokens and D up to 128."""
    # Under autocast, norms leave queries and keys wider than values.
    q, k = q.to(v.dtype), k.to(v.dtype)
    if chosen("short_rows", v):
        from .triton import short_rows

        return short_rows.attend_short_rows(q, k, v)
    return explicit_softmax(q, k, v)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x @ weight.T + bias)`` with the tanh approximation (Hendrycks & Gimpel, 2016).

    Args:
        x: ``[..., C]``, any floating dtype.
        weight, bias: ``[F, C]`` and ``[F]``.

    Returns:
        ``[..., F]``.
    """
    if chosen("gelu", x):
        from .triton import gelu

        return gelu.linear_gelu(x, weight, bias)
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")
