"""The layers that the STDiT models share: embedders, norms, MLP, self- and cross-attention.

Parameter names are those of the public Open-Sora checkpoints.

Legend: B samples, R rows, L tokens of a row, T frames, S patches of a frame, C hidden width,
H heads, D = C / H, N packed text tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from opensora_sp.transfer import to_device

from .attention import Backend, attention
from .functions import normalize, rotate, with_zero_gradients
from .hook_points import Attend, Point
from .kernels import chosen, linear_gelu, linear_qk_norm, qk_norm
from .packing import Lengths, Packing
from .take import take
from .token_groups import Groups
from .token_layout import SPATIAL, TEMPORAL, Rows


def position_angles(positions: Tensor, per_position: Tensor) -> Tensor:
    """``positions[..., None] * per_position`` in at least float32."""
    dtype = torch.promote_types(positions.dtype, torch.float32)
    return positions.to(dtype)[..., None] * per_position.to(dtype)


def frequencies(width: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """``[width / 2]``, from 1 down to 1 / 10000."""
    return 1.0 / 10000 ** (torch.arange(0, width, 2, device=device).to(dtype) / width)


def position_embedding(positions: Tensor, width: int) -> Tensor:
    """Positions ``[...]`` -> ``[..., width]``: sines, then cosines, in the positions' dtype."""
    angles = position_angles(positions, frequencies(width, positions.dtype, positions.device))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def frame_position_embedding(height: Tensor, width: Tensor, channels: int) -> Tensor:
    """Coordinates of a frame's rows ``[H]`` and columns ``[W]`` -> ``[H * W, channels]``.

    The first half of the channels encodes the column, the second the row.
    """
    assert channels % 4 == 0, channels
    row, column = torch.meshgrid(height, width, indexing="ij")
    halves = [position_embedding(axis.flatten(), channels // 2) for axis in (column, row)]
    return torch.cat(halves, dim=-1)


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


class PatchEmbed3D(nn.Module):
    """Patches -> tokens. The weight is that of a convolution whose stride is the patch."""

    def __init__(self, patch_size: tuple[int, int, int], in_channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv3d(in_channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, patches: Tensor) -> Tensor:
        """``[R, L, V * c]``, a patch ordered (pt, ph, pw, c) -> ``[R, L, C]``."""
        weight = rearrange(self.proj.weight, "width c pt ph pw -> width (pt ph pw c)")
        return F.linear(patches, weight, self.proj.bias)


class PositionEmbedding2D(nn.Module):
    """Sine-cosine embedding of a patch's column and row, scaled to the resolution trained at."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, rows: Rows, device: torch.device) -> Tensor:
        """Of the patches of the local rows, float32 ``[1, S, C]`` or ``[R, 1, C]``.

        With a mask each clip lies on a grid of its own size: ``[R, S, C]`` or ``[R, 1, C]``.
        """
        grid, scale = rows.grid, rows.scale(device)
        patches, columns = rows.patches(device), grid.shape[2]  # [1, S] or [R, 1]
        # Height and width in patches, of all samples or of each.
        sizes = [grid.shape[1:]] if grid.mask is None else grid.mask.frame_sizes()

        halves = []
        for axis, coordinates in ((1, patches % columns), (0, patches // columns)):
            steps = [round((size[0] * size[1]) ** 0.5) / size[axis] for size in sizes]
            step: float | Tensor = steps[0]
            if grid.mask is not None:
                samples = rows.samples(device)
                step = to_device(torch.tensor(steps), device)[samples][:, None]  # [R, 1]
            halves.append(position_embedding(coordinates / scale * step, self.width // 2))
        return torch.cat(halves, dim=-1)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding over the frames (Su et al., 2021).

    Neighbouring channels are pairs, which are rotated by an angle.
    """

    def __init__(self, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.freqs = nn.Parameter(frequencies(head_width, torch.float32), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Casting a model leaves the frequencies in float32.

        Rounded ones would turn long rows by wrong angles.
        """
        exact = self.freqs.data
        super()._apply(fn, recurse)
        if exact.is_meta:
            exact = frequencies(self.head_width, torch.float32, self.freqs.device)
        self.freqs.data = exact.to(self.freqs.device)
        return self

    def forward(self, q: Tensor, rotation: Tensor) -> Tensor:
        """Rotate queries or keys ``[R, L, H, D]``."""
        return rotate(q, rotation)

    def rotation(self, rows: Rows, in_frame: bool, device: torch.device) -> Tensor:
        """Cosine and sine for each channel of queries and keys, ``[2, 1 or R, 1 or L, 1, D]``.

        ``in_frame``: for attention within a frame, not over frames.
        """
        angles = self.angles(rows, in_frame, device)[:, :, None]
        # The first channel of a pair takes minus the sine of the second.
        angles = torch.stack([-angles, angles], dim=-1).flatten(-2)
        return torch.stack([angles.cos(), angles.sin()])

    def angles(self, rows: Rows, in_frame: bool, device: torch.device) -> Tensor:
        """``[1 or R, 1 or L, D/2]``, by the frame."""
        assert not in_frame  # all would be the same
        return position_angles(rows.frames(device), self.freqs)


class RotaryEmbedding3D(RotaryEmbedding):
    """Rotary position embedding of Open-Sora 1.3: frame, line and column have a third of the
    channels each.

    Within a frame, frames are at 0. Over frames, lines and columns are counted within their window.
    Distances of lines and columns follow the resolution (``PatchGrid.scale``).
    """

    def __init__(self, head_width: int) -> None:
        super().__init__(head_width // 3)

    def rotation(self, rows: Rows, in_frame: bool, device: torch.device) -> Tensor:
        if torch.compiler.is_compiling():
            # Only where a strategy has other rows attend. The cache would be guarded.
            return super().rotation(rows, in_frame, device)
        key = ("rotation", rows.layout, rows.start, rows.stop, in_frame)
        compute = super().rotation
        return rows.grid.cached(key, lambda: compute(rows, in_frame, device))

    def angles(self, rows: Rows, in_frame: bool, device: torch.device) -> Tensor:
        """``[1 or R, L, D/2]``."""
        patch, columns = rows.patches(device), rows.grid.shape[2]
        frame, line, column = rows.frames(device), patch // columns, patch % columns
        if in_frame:
            frame = torch.zeros_like(frame)
        elif rows.grid.kernel is not None:
            height, width = rows.grid.kernel
            line = line % height if height > 0 else line
            column = column % width if width > 0 else column

        scale = rows.scale(device)
        axes = torch.broadcast_tensors(frame.to(scale), line / scale, column / scale)
        return torch.cat([position_angles(axis, self.freqs) for axis in axes], dim=-1)


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
        return self.mlp(timestep_sinusoid(t, self.num_frequencies).to(self.mlp[0].weight.dtype))


class SizeEmbedder(TimestepEmbedder):
    """Scalars of a sample (fps, sizes), each embedded alone, then concatenated."""

    def forward(self, s: Tensor, num_samples: int) -> Tensor:  # type: ignore[override]
        """``[n]`` or ``[n, k]``, n dividing ``num_samples`` (tiled) -> ``[num_samples, k * C]``."""
        s = s[:, None] if s.ndim == 1 else s
        if num_samples % s.shape[0]:
            raise ValueError(
                f"got sizes for {s.shape[0]} samples; expected {num_samples}; "
                "pass one row per sample"
            )
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
            own = [null] if is_dropped else [caption[tokens] for tokens in slices]
            parts += own
            lengths.append(sum(map(len, own)))
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
