"""The temporal autoencoder of Open-Sora 1.2: latents of single images to latents of clips, a
quarter as many in time.

Causal 3D convolutions and residual blocks as in MAGVIT-v2 (Yu et al., 2023); only frames are
resampled, never height and width. Group norm takes its statistics over all frames, so the network
as a whole is not causal: it matters how a clip is cut (``open_sora_vae.py``). Parameters are
named as in the public Open-Sora checkpoints.

Legend: B samples, C channels (c of latents), T frames, f latent frames, H x W height and width of
the image latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

Triple = tuple[int, int, int]


class CausalConv3d(nn.Module):
    """A convolution that sees no later frame: all padding in time is in front.

    With ``stride`` 2 in time the window ends at every second frame, so that a multiple of 2 frames
    is halved. Open-Sora 1.3 has one frame of padding more (``front``), which makes 1 + 2n frames to
    1 + n.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Triple = 3,
        *,
        stride: int = 1,
        spatial_stride: int = 1,
        dilation: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        front: int | None = None,
    ) -> None:
        super().__init__()
        t, h, w = (kernel_size,) * 3 if isinstance(kernel_size, int) else kernel_size
        self.front = dilation * (t - 1) + 1 - stride if front is None else front
        self.padding_mode = padding_mode
        self.conv = nn.Conv3d(
            in_channels,
            out_channels,
            (t, h, w),
            stride=(stride, spatial_stride, spatial_stride),
            dilation=(dilation, 1, 1),
            padding=(0, h // 2, w // 2),
            bias=bias,
            padding_mode=padding_mode,
        )

    def forward(self, x: Tensor) -> Tensor:
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        # Height and width are padded by the convolution itself, in the same mode.
        return self.conv(F.pad(x, (0, 0, 0, 0, self.front, 0), mode))


class ResBlock(nn.Module):
    """Twice norm, activation, convolution, added to the input; a convolution named
    ``shortcut_name`` fits the input where the channels change.
    """

    shortcut_name = "conv3"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_groups: int,
        shortcut_kernel: int = 1,
        *,
        eps: float = 1e-5,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(num_groups, in_channels, eps)
        self.conv1 = CausalConv3d(in_channels, out_channels, bias=bias)
        self.norm2 = nn.GroupNorm(num_groups, out_channels, eps)
        self.conv2 = CausalConv3d(out_channels, out_channels, bias=bias)
        if in_channels != out_channels:
            shortcut = CausalConv3d(in_channels, out_channels, shortcut_kernel, bias=bias)
            # Under the checkpoints' name, which differs between Open-Sora 1.2 and 1.3.
            self.add_module(self.shortcut_name, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if hasattr(self, self.shortcut_name):
            shortcut = self.get_submodule(self.shortcut_name)(x)
        x = self.conv1(F.silu(self.norm1(x)))
        return shortcut + self.conv2(F.silu(self.norm2(x)))


def res_blocks(number: int, in_channels: int, out_channels: int, num_groups: int) -> nn.Sequential:
    """``number`` residual blocks, of which the first changes the channels."""
    inputs = [in_channels] + [out_channels] * (number - 1)
    return nn.Sequential(*(ResBlock(channels, out_channels, num_groups) for channels in inputs))


class Encoder(nn.Module):
    """``[B, c_in, T, H, W]`` -> ``[B, c_out, f, H, W]``; ``halves[i]`` says whether level i ends in
    half the frames.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: Sequence[int],
        halves: Sequence[bool],
        depth: int,
        groups: int,
    ) -> None:
        super().__init__()
        entering = [widths[0], *widths[:-1]]

        self.conv_in = CausalConv3d(in_channels, widths[0], bias=False)
        self.block_res_blocks = nn.ModuleList(
            res_blocks(depth, before, width, groups)
            for before, width in zip(entering, widths, strict=True)
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv3d(width, width, stride=2) if half else nn.Identity()
            for width, half in zip(widths[:-1], halves, strict=True)
        )

        self.res_blocks = res_blocks(depth, widths[-1], widths[-1], groups)
        self.norm1 = nn.GroupNorm(groups, widths[-1])
        self.conv2 = CausalConv3d(widths[-1], out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level, blocks in enumerate(self.block_res_blocks):
            x = blocks(x)
            if level < len(self.conv_blocks):
                x = self.conv_blocks[level](x)
        x = self.res_blocks(x)
        return self.conv2(F.silu(self.norm1(x)))


class Decoder(nn.Module):
    """``[B, c_in, f, H, W]`` -> ``[B, c_out, T, H, W]``: the levels of the encoder in reverse."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: Sequence[int],
        halves: Sequence[bool],
        depth: int,
        groups: int,
    ) -> None:
        super().__init__()
        # Named by levels as in the encoder, though the last level runs first.
        entering = [*widths[1:], widths[-1]]

        self.conv1 = CausalConv3d(in_channels, widths[-1])
        self.res_blocks = res_blocks(depth, widths[-1], widths[-1], groups)
        self.block_res_blocks = nn.ModuleList(
            res_blocks(depth, before, width, groups)
            for before, width in zip(entering, widths, strict=True)
        )
        self.conv_blocks = nn.ModuleList(
            # Each frame becomes two, as twice the channels that forward rearranges.
            CausalConv3d(width, 2 * width) if half else nn.Identity()
            for width, half in zip(widths[1:], halves, strict=True)
        )
        self.norm1 = nn.GroupNorm(groups, widths[0])
        self.conv_out = CausalConv3d(widths[0], out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.res_blocks(self.conv1(x))
        for level in reversed(range(len(self.block_res_blocks))):
            x = self.block_res_blocks[level](x)
            if level and isinstance(self.conv_blocks[level - 1], CausalConv3d):
                x = self.conv_blocks[level - 1](x)  # [B, 2 * C, T, H, W]
                x = rearrange(x, "b (c two) t h w -> b c (t two) h w", two=2)
        return self.conv_out(F.silu(self.norm1(x)))


class TemporalVAE(nn.Module):
    """Image latents ``[B, c, T, H, W]`` to clip latents ``[B, c, f, H, W]`` and back; ``f = ceil(T
    / time_factor)``.

    Every T is taken: frames of zeros are put in front up to a multiple of ``time_factor``, and cut
    off when decoding. The defaults fit the released weights.

    Args:
        in_out_channels: channels of the image latents.
        latent_embed_dim: channels inside, between the two 1x1x1 convolutions.
        embed_dim: channels of the clip latents.
        filters: width of the outermost level; ``channel_multipliers`` has the width of every level
            relative to it.
        temporal_downsample: for every level but the last, whether it ends in half as many frames.
        num_groups: of group norm.
    """

    def __init__(
        self,
        in_out_channels: int = 4,
        latent_embed_dim: int = 4,
        embed_dim: int = 4,
        filters: int = 128,
        num_res_blocks: int = 4,
        channel_multipliers: Sequence[int] = (1, 2, 2, 4),
        temporal_downsample: Sequence[bool] = (False, True, True),
        num_groups: int = 32,
    ) -> None:
        super().__init__()
        if len(temporal_downsample) != len(channel_multipliers) - 1:
            raise ValueError(
                f"got temporal_downsample {tuple(temporal_downsample)} for channel_multipliers "
                f"{tuple(channel_multipliers)}; expected one entry for every level but the last; "
                "change one of them"
            )

        widths = [filters * multiplier for multiplier in channel_multipliers]
        levels = (widths, temporal_downsample, num_res_blocks, num_groups)
        self.time_factor = 2 ** sum(temporal_downsample)
        self.encoder = Encoder(in_out_channels, 2 * latent_embed_dim, *levels)
        self.quant_conv = CausalConv3d(2 * latent_embed_dim, 2 * embed_dim, 1)
        self.post_quant_conv = CausalConv3d(embed_dim, latent_embed_dim, 1)
        self.decoder = Decoder(latent_embed_dim, in_out_channels, *levels)

    def moments(self, x: Tensor) -> Tensor:
        """``[B, c, T, H, W]`` -> means and log variances ``[B, 2 * c, f, H, W]``."""
        # In front, as in the release: the last frames lie on whole latent frames.
        x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % self.time_factor, 0))
        return self.quant_conv(self.encoder(x))

    def encode(self, x: Tensor) -> Tensor:
        """``[B, c, T, H, W]`` -> the posterior means ``[B, c, f, H, W]``."""
        return self.moments(x).chunk(2, dim=1)[0]

    def decode(self, z: Tensor, *, num_frames: int) -> Tensor:
        """``[B, c, f, H, W]``, of ``num_frames`` frames, -> ``[B, c, num_frames, H, W]``."""
        return self.decoder(self.post_quant_conv(z))[:, :, -num_frames % self.time_factor :]
