"""The layers of the STDiT models' blocks: norm, MLP, self- and cross-attention.

Parameter names are those of the public Open-Sora checkpoints.

Legend: R rows, L tokens of a row, C hidden width, H heads, D = C / H, N packed text tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .attention import Backend, attention
from .functions import normalize, with_zero_gradients
from .hook_points import Attend, Point
from .kernels import chosen, linear_gelu, linear_qk_norm, qk_norm
from .packing import Lengths, Packing
from .positions import RotaryEmbedding
from .take import take
from .token_groups import Groups
from .token_layout import SPATIAL, TEMPORAL, Rows


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a function of a layer's parameters may stand for it.

    Other classes in its place, such as peft's, have parameters of their own, and hooks see calls.
    """
    hooks = (
        layer._forward_pre_hooks,
        layer._forward_hooks,
        layer._backward_pre_hooks,
        layer._backward_hooks,
    )
    return type(layer) is kind and not any(hooks)


def deferred_bias(layer: nn.Module) -> Tensor | None:
    """The bias of a branch's last layer, if the kernel that adds the branch to the tokens adds it.

    That kernel reads the branch's gradient in any case, and sums the gradient of the bias on the
    way.
    """
    if isinstance(layer, nn.Linear) and is_plain(layer, nn.Linear):
        return layer.bias if chosen("modulation", layer.weight) else None
    return None


def without_deferred_bias(layer: nn.Linear, x: Tensor) -> Tensor:
    """A branch's last layer, but for its ``deferred_bias``."""
    return layer(x) if deferred_bias(layer) is None else F.linear(x, layer.weight)


class Mlp(nn.Module):
    """Linear, tanh-GELU, Linear on the last dim. ``defers_bias``: that of the last one."""

    def __init__(self, width: int, hidden: int, out: int, *, defers_bias: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, out)
        self.defers_bias = defers_bias

    def forward(self, x: Tensor) -> Tensor:
        if is_plain(self.fc1, nn.Linear) and self.fc1.bias is not None:
            hidden = linear_gelu(x, self.fc1.weight, self.fc1.bias)
        else:
            hidden = F.gelu(self.fc1(x), approximate="tanh")
        return without_deferred_bias(self.fc2, hidden) if self.defers_bias else self.fc2(hidden)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (Zhang & Sennrich, 2019), in at least float32."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normalize(x, self.eps)


class SelfAttention(Point):
    """Multi-head attention of each row to itself, with optional RMS norm of queries and keys.

    These are normed, then rotated; with ``norm_last`` they are rotated first, as in Open-Sora 1.1.
    ``in_frame``: it attends within a frame, not over frames. ``defers_bias``: the caller adds the
    ``deferred_bias`` of ``proj``.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        qk_norm: bool,
        rope: RotaryEmbedding | None = None,
        norm_last: bool = False,
        in_frame: bool = False,
        defers_bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.norm_last, self.in_frame = num_heads, norm_last, in_frame
        self.defers_bias = defers_bias
        self.qkv = nn.Linear(width, 3 * width)
        norm = partial(RMSNorm, width // num_heads) if qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()
        self.proj = nn.Linear(width, width)
        self.attend = Attend(SPATIAL if in_frame else TEMPORAL)
        # In a list: the model owns the parameter, not its blocks.
        self.ropes = [] if rope is None else [rope]

    def local(
        self,
        x: Tensor,
        rows: Rows,
        rotation: Tensor | None = None,
        groups: Groups | None = None,
    ) -> Tensor:
        """``[R, L, C]`` -> ``[R, L, C]``.

        ``rotation`` and ``groups`` are those of the rows, if precomputed.
        """
        # Rows of the other layout are brought into this one where tokens attend.
        own_layout = SPATIAL if self.in_frame else TEMPORAL
        if rows.length == 1 and rows.layout == own_layout and rows.are_sequences:
            v = self._values(x)
            return self._project(self.attend(v, v, v, rows, groups))

        if not self.ropes:
            rotation = None
        elif rotation is None:
            rotation = self.ropes[0].rotation(rows, self.in_frame, x.device)
        q, k, v = self._normed(x, rotation)
        return self._project(self.attend(q, k, v, rows, groups))

    def _project(self, out: Tensor) -> Tensor:
        out = out.flatten(-2)
        return without_deferred_bias(self.proj, out) if self.defers_bias else self.proj(out)

    def _normed(self, x: Tensor, rotation: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[R, L, H, D]`` each."""
        norms = self.q_norm, self.k_norm
        if not self.norm_last and all(is_plain(norm, RMSNorm) for norm in norms):
            of_norms: Any = self.q_norm.weight, self.k_norm.weight, rotation, self.q_norm.eps
            if is_plain(self.qkv, nn.Linear) and self.qkv.bias is not None:
                return linear_qk_norm(x, self.qkv.weight, self.qkv.bias, *of_norms)
            return qk_norm(self._product(x), *of_norms)

        q, k, v = self._product(x).unbind(2)
        if not self.norm_last:
            q, k = self.q_norm(q), self.k_norm(k)
        for rope in self.ropes:
            q, k = rope(q, rotation), rope(k, rotation)
        if self.norm_last:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _product(self, x: Tensor) -> Tensor:
        """Queries, keys and values, ``[R, L, 3, H, D]``."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1))

    def _values(self, x: Tensor) -> Tensor:
        """The values ``[R, 1, H, D]``, which are what single tokens get, such as those of images.

        The weights of queries and keys get zeros as gradients, in the order of other clips: ZeRO
        sums gradients over ranks in the order in which they come.
        """
        width = x.shape[-1]
        if is_plain(self.qkv, nn.Linear) and self.qkv.bias is not None:
            v = F.linear(x, self.qkv.weight[-width:], self.qkv.bias[-width:])
        else:
            v = self.qkv(x)[..., -width:]
        v = with_zero_gradients(v, *self.q_norm.parameters(), *self.k_norm.parameters())
        return v.unflatten(-1, (self.num_heads, -1))


class CrossAttention(nn.Module):
    """Multi-head attention of tokens to the text of their own sample.

    ``defers_bias``: the caller adds the ``deferred_bias`` of ``proj``.
    """

    def __init__(self, width: int, num_heads: int, *, defers_bias: bool = False) -> None:
        super().__init__()
        self.num_heads, self.defers_bias = num_heads, defers_bias
        self.q_linear = nn.Linear(width, width)
        self.kv_linear = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(
        self,
        x: Tensor,
        text: Tensor,
        lengths: Lengths | Packing,
        *,
        order: Tensor | None = None,
        keys_values: Tensor | None = None,
        backend: str | Backend = "auto",
    ) -> Tensor:
        """Tokens ``[R, L, C]`` attend to packed text ``[N, C]``.

        Args:
            lengths: numbers of tokens and of text tokens that belong together.
            order: int64 ``[R * L]``, the tokens in the order of the texts, where they do not lie
                in it.
            keys_values: keys and values ``[N, 2 * C]`` of the text, if precomputed.
            backend: as in ``attention``.
        """
        q = rearrange(self.q_linear(x), "r l (h d) -> (r l) h d", h=self.num_heads)
        kv = self.kv_linear(text) if keys_values is None else keys_values
        # The backward of this cut is one stack, in the layout of the product.
        k, v = kv.unflatten(-1, (2, self.num_heads, -1)).unbind(1)
        if order is not None:
            q = take(q, order)

        out = attention(q, k, v, lengths=lengths, backend=backend)  # [R * L, H, D]
        if order is not None:
            out = torch.empty_like(out).index_copy(0, order, out)
        out = out.reshape(x.shape)
        return without_deferred_bias(self.proj, out) if self.defers_bias else self.proj(out)
