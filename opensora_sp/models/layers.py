"""The layers of the STDiT models: norm, MLP, self- and cross-attention, and the embedders of
patches, numbers and captions.

Parameter names as in the public Open-Sora checkpoints.

Legend: B samples, R rows, L tokens of a row or of a caption, C hidden width, H heads, D = C / H,
V patch volume, c channels of a latent, Cy width of text features, N packed text tokens.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .attention import attention
from .attention_table import Backend
from .functions import normalize, take, with_zero_gradients
from .hook_points import Attend, Point
from .kernels.fused import chosen, linear_gelu, linear_qk_norm, qk_norm
from .packing import Lengths, Packing, RowTables
from .positions import RotaryEmbedding, position_angles
from .token_layout import SPATIAL, TEMPORAL, Rows


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """True if a function of a layer's parameters may stand for it.

    Other classes in its place, such as peft's, have further parameters, and hooks see calls.
    """
    forward_hooks = layer._forward_pre_hooks or layer._forward_hooks
    has_hooks = forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
    return type(layer) is kind and not has_hooks


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
    """Linear, tanh-GELU, Linear on the last dim. ``defers_bias``: of the last one."""

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

    def local(self, x: Tensor, rows: Rows, tables: RowTables | None = None) -> Tensor:
        """``[R, L, C]`` -> ``[R, L, C]``; without ``tables``, they are computed from the rows."""
        rotation, groups = tables or RowTables()
        # Rows of the other layout are brought into this one where tokens attend.
        if rows.length == 1 and rows.layout == self.attend.kind and rows.are_sequences:
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
        if not self.norm_last and all(is_plain(layer, RMSNorm) for layer in norms):
            norm: Any = self.q_norm.weight, self.k_norm.weight, rotation, self.q_norm.eps
            if is_plain(self.qkv, nn.Linear) and self.qkv.bias is not None:
                return linear_qk_norm(x, self.qkv.weight, self.qkv.bias, *norm)
            return qk_norm(self._product(x), *norm)

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
        """The values ``[R, 1, H, D]``, which are the result for single tokens, such as of images.

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


class PatchEmbed3D(nn.Module):
    """Patches -> tokens. A convolution whose stride is the patch."""

    def __init__(self, patch_size: tuple[int, int, int], in_channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(in_channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, patches: Tensor) -> Tensor:
        """``[R, L, V * c]``, a patch ordered (pt, ph, pw, c) -> ``[R, L, C]``."""
        weight = rearrange(self.proj.weight, "width c pt ph pw -> width (pt ph pw c)")
        return F.linear(patches, weight, self.proj.bias)


def timestep_sinusoid(t: Tensor, width: int, max_period: float = 10000.0) -> Tensor:
    """Scalars ``[...]`` -> ``[..., width]``: cosines, then sines, and a zero if the width is odd.

    The frequencies, from 1 down to nearly ``1 / max_period``, are float32, as in the released
    models.
    """
    exponents = torch.arange(width // 2, dtype=torch.float32, device=t.device) / (width // 2)
    angles = position_angles(t, torch.exp(-math.log(max_period) * exponents))
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=-1), (0, width % 2))


class TimestepEmbedder(nn.Module):
    """Scalars -> vectors: cosines and sines of 128 frequencies, then a two-layer MLP."""

    def __init__(self, width: int, num_frequencies: int = 256) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(num_frequencies, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.num_frequencies = num_frequencies

    def forward(self, t: Tensor) -> Tensor:
        """``[...]`` -> ``[..., C]``."""
        dtype = next(self.mlp.parameters()).dtype
        return self.mlp(timestep_sinusoid(t, self.num_frequencies).to(dtype))


class SizeEmbedder(TimestepEmbedder):
    """Scalars of a sample (fps, sizes), each embedded alone, then concatenated."""

    def forward(self, s: Tensor, num_samples: int) -> Tensor:  # type: ignore[override]
        """``[n]`` or ``[n, k]``, n dividing ``num_samples`` (tiled) -> ``[num_samples, k * C]``."""
        s = s[:, None] if s.ndim == 1 else s
        return super().forward(s.repeat(num_samples // s.shape[0], 1)).flatten(1)


class CaptionEmbedder(nn.Module):
    """Text features -> hidden width. ``y_embedding`` is the null caption, fixed at construction."""

    y_embedding: Tensor

    def __init__(self, in_channels: int, width: int, num_tokens: int) -> None:
        super().__init__()
        self.register_buffer("y_embedding", torch.randn(num_tokens, in_channels) / in_channels**0.5)
        self.y_proj = Mlp(in_channels, width, width)

    def forward(self, caption: Tensor) -> Tensor:
        """``[..., Cy]`` -> ``[..., C]``."""
        return self.y_proj(caption)

    def pack(self, y: Tensor, mask: Tensor | None, drop: Tensor | None) -> tuple[Tensor, list[int]]:
        """The tokens in use of each sample, one sample after the other.

        The host waits for no device if ``mask`` and ``drop`` are on the CPU. Elsewhere they are
        read back.

        Args:
            y: ``[B, 1, L, Cy]``.
            mask: 1 for tokens in use, ``[n, L]`` or ``[n, 1, 1, L]`` with n dividing B (tiled); a
                row of zeros counts as its first token in use.
            drop: bool ``[B]``; True takes the null caption, all its tokens, instead of y.

        Returns:
            Packed text features ``[N, Cy]`` and the number of tokens of each sample, host integers.
        """
        num_samples, _, length, _ = y.shape
        used = [[slice(0, length)]] if mask is None else used_tokens(mask.reshape(-1, length))
        used *= num_samples // len(used)
        dropped = [False] * num_samples if drop is None else drop.tolist()
        null = self.y_embedding.to(y.dtype)

        parts: list[Tensor] = []
        lengths: list[int] = []
        for caption, slices, is_dropped in zip(y[:, 0], used, dropped, strict=True):
            used_parts = [null] if is_dropped else [caption[tokens] for tokens in slices]
            parts += used_parts
            lengths.append(sum(map(len, used_parts)))
        return torch.cat(parts), lengths


def used_tokens(mask: Tensor) -> list[list[slice]]:
    """The runs of tokens in use of each row of a mask ``[n, L]``, or its first token if none is."""
    used = []
    for row in mask.tolist():
        runs, stop = [], 0
        for in_use, tokens in groupby(row, bool):
            start, stop = stop, stop + len(list(tokens))
            if in_use:
                runs.append(slice(start, stop))
        used.append(runs or [slice(0, 1)])
    return used
