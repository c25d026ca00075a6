"""What brings the inputs of the STDiT models to the hidden width: patches, numbers and captions.

Parameter names are those of the public Open-Sora checkpoints.

Legend: B samples, R rows, L tokens of a row or of a caption, V patch volume, c channels of a
latent, C hidden width, Cy width of text features, N packed text tokens.
"""

from __future__ import annotations

import math
from itertools import groupby

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .layers import Mlp
from .positions import position_angles


class PatchEmbed3D(nn.Module):
    """Patches -> tokens. The weight is that of a convolution whose stride is the patch."""

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
