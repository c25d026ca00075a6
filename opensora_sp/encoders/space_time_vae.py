"""The video autoencoder network of Open-Sora 1.3: frames to latents and back in one network.

Stable Diffusion's autoencoder (Rombach et al., 2022) has these layers, here with causal 3D
convolutions in place of 2D ones, as in MAGVIT-v2 (Yu et al., 2023). Some levels resample height and
width, the others time as well. Group norm takes its statistics over all frames, so it matters how a
clip is cut (``open_sora_vae_v13.py``). Parameters are named as in the public checkpoints.

Legend: B samples, C channels (c of latents), T frames, f latent frames, H x W pixels, h x w latent
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .video_vae import CausalConv3d, ResBlock

GROUPS, EPS = 32, 1e-6
# The video step of the decoder has torch's default.
UPSAMPLE_EPS = 1e-5


class TiledConv3d(nn.Conv3d):
    """A convolution in tiles along the longest of frames, height and width, to bound its memory.

    Results are equal to the whole convolution's. Tiles are about ``tile_size`` positions long. In
    addition to input and output there is one tile at a time.
    """

    tile_size: int

    def forward(self, x: Tensor) -> Tensor:
        padding = [border for border in self.padding if isinstance(border, int)]
        padded = [size + 2 * border for size, border in zip(x.shape[2:], padding, strict=True)]
        sizes = [size - kernel + 1 for size, kernel in zip(padded, self.kernel_size, strict=True)]
        axis = max(range(3), key=lambda border: padded[border])
        count = min(max(1, padded[axis] // self.tile_size), sizes[axis])
        bounds = [sizes[axis] * i // count for i in range(count + 1)]

        out = x.new_empty(len(x), self.out_channels, *sizes)
        for start, stop in pairwise(bounds):
            # No name for a tile, which would keep it while the next one is computed.
            tile = out.narrow(axis + 2, start, stop - start)
            tile.copy_(self._tile(x, axis, start, stop, padding))
        return out

    def _tile(self, x: Tensor, axis: int, start: int, stop: int, padding: list[int]) -> Tensor:
        """The outputs from ``start`` to ``stop`` along an axis (0 is time)."""
        first = start - padding[axis]
        last = stop - padding[axis] + self.kernel_size[axis] - 1
        length = x.shape[axis + 2]
        inside = x.narrow(axis + 2, max(first, 0), min(last, length) - max(first, 0))

        # Along the axis only the tiles at both ends have padding.
        around = [[0, 0], [0, 0], [0, 0]]
        around[2 - axis] = [max(-first, 0), max(last - length, 0)]
        others = [0 if i == axis else border for i, border in enumerate(padding)]
        tile = F.pad(inside, [*chain.from_iterable(around)])
        return F.conv3d(tile, self.weight, self.bias, padding=others)


def tile_convolutions(model: nn.Module, tile_size: int) -> None:
    """Make the 3D convolutions of stride 1 in ``model`` tiled ones; names of tensors stay."""
    for module in model.modules():
        if type(module) is nn.Conv3d and module.stride == (1, 1, 1):
            module.__class__ = TiledConv3d
            module.tile_size = tile_size  # type: ignore[assignment]


class BiasedResBlock(ResBlock):
    """A residual block with biases, under the names of this autoencoder."""

    shortcut_name = "nin_shortcut"

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, GROUPS, eps=EPS, bias=True)


class CausalAttention(nn.Module):
    """Self-attention of one head over all channels.

    A token sees itself and those before it, in the order frame, row, column: also within a frame.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels, EPS)
        self.q = CausalConv3d(channels, channels, 1)
        self.k = CausalConv3d(channels, channels, 1)
        self.v = CausalConv3d(channels, channels, 1)
        self.proj_out = CausalConv3d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            rearrange(project(normed), "b c t h w -> b 1 (t h w) c")
            for project in (self.q, self.k, self.v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj_out(out[:, 0].mT.reshape(x.shape))


class FrameStep(nn.Module):
    """Resamples height and width of single frames, at most ``micro_batch_size`` at once.

    They are halved, rounded down, with padding on the right and at the bottom alone, or doubled.
    """

    micro_batch_size: int | None = None

    def __init__(self, channels: int, *, halves: bool) -> None:
        super().__init__()
        self.halves = halves
        stride, padding = (2, 0) if halves else (1, 1)
        self.conv = nn.Conv2d(channels, channels, 3, stride=stride, padding=padding)

    def resample(self, frames: Tensor) -> Tensor:
        """``[N, C, H, W]`` -> ``[N, C, H', W']``."""
        if self.halves:
            return self.conv(F.pad(frames, (0, 1, 0, 1)))
        return self.conv(F.interpolate(frames, scale_factor=2.0))

    def forward(self, x: Tensor) -> Tensor:
        frames = rearrange(x, "b c t h w -> (b t) c h w")
        parts = frames.split(self.micro_batch_size or len(frames))
        return rearrange(
            torch.cat([self.resample(part) for part in parts]), "(b t) c h w -> b c t h w", b=len(x)
        )


class VideoDownsample(nn.Module):
    """Half the frames, height and width, all rounded up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(channels, channels, stride=2, spatial_stride=2, front=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class SmoothedRepeat(nn.Module):
    """Two convolutions that smooth what repetition has made, added to it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = CausalConv3d(channels, channels)
        self.norm1 = nn.GroupNorm(GROUPS, channels, UPSAMPLE_EPS)
        self.conv2 = CausalConv3d(channels, channels)
        self.norm2 = nn.GroupNorm(GROUPS, channels, UPSAMPLE_EPS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(hidden)) + x) + x


class VideoUpsample(nn.Module):
    """Twice the frames, height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv3d = SmoothedRepeat(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3d(F.interpolate(x, scale_factor=2.0))


class Middle(nn.Module):
    """The layers at the smallest size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = BiasedResBlock(channels, channels)
        self.attn_1 = CausalAttention(channels)
        self.block_2 = BiasedResBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Level(nn.Module):
    """Residual blocks at one size, and perhaps a step to another one."""

    def __init__(self, in_channels: int, out_channels: int, depth: int) -> None:
        super().__init__()
        inputs = [in_channels] + [out_channels] * (depth - 1)
        self.block = nn.ModuleList(BiasedResBlock(channels, out_channels) for channels in inputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        for name in ("downsample", "upsample"):
            if hasattr(self, name):
                x = self.get_submodule(name)(x)
        return x


class Encoder(nn.Module):
    """``[B, in_channels, T, H, W]`` -> moments ``[B, 2 * z_channels, f, h, w]``.

    Args:
        ch: width of the first level; ``ch_mult`` has the width of every level relative to it.
        down_sampling_layer: the levels that end in half the frames. All but the last one end in
            half the height and width.
    """

    def __init__(
        self,
        ch: int = 128,
        ch_mult: Sequence[int] = (1, 2, 4, 4),
        num_res_blocks: int = 2,
        in_channels: int = 3,
        z_channels: int = 16,
        down_sampling_layer: Sequence[int] = (1, 2),
    ) -> None:
        super().__init__()
        widths = [ch * multiplier for multiplier in ch_mult]
        self.conv_in = CausalConv3d(in_channels, ch)
        self.down = nn.ModuleList(
            Level(before, width, num_res_blocks)
            for before, width in zip([ch, *widths], widths, strict=False)
        )
        for i, width in enumerate(widths[:-1]):
            in_time = i in down_sampling_layer
            self.down[i].downsample = (
                VideoDownsample(width) if in_time else FrameStep(width, halves=True)
            )

        self.mid = Middle(widths[-1])
        self.norm_out = nn.GroupNorm(GROUPS, widths[-1], EPS)
        self.conv_out = CausalConv3d(widths[-1], 2 * z_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """``[B, z_channels, f, h, w]`` -> ``[B, out_ch, T, H, W]``, T = factor * (f - 1) + 1.

    The levels are run from the last to the first, each with a residual block more than the
    encoder's. ``temporal_up_layers`` are those that end in twice the frames; see ``Encoder``.
    """

    def __init__(
        self,
        ch: int = 128,
        ch_mult: Sequence[int] = (1, 2, 4, 4),
        num_res_blocks: int = 2,
        out_ch: int = 3,
        z_channels: int = 16,
        temporal_up_layers: Sequence[int] = (2, 3),
    ) -> None:
        super().__init__()
        widths = [ch * multiplier for multiplier in ch_mult]
        self.time_factor = 2 ** len(temporal_up_layers)
        self.conv_in = CausalConv3d(z_channels, widths[-1])
        self.mid = Middle(widths[-1])
        self.up = nn.ModuleList(
            Level(before, width, num_res_blocks + 1)
            for before, width in zip([*widths[1:], widths[-1]], widths, strict=True)
        )
        for i, width in list(enumerate(widths))[1:]:
            in_time = i in temporal_up_layers
            self.up[i].upsample = (
                VideoUpsample(width) if in_time else FrameStep(width, halves=False)
            )

        self.norm_out = nn.GroupNorm(GROUPS, widths[0], EPS)
        # A bare convolution, by its name in the release, that is padded in ``forward``.
        self.conv_out = nn.Conv3d(widths[0], out_ch, 3, padding=(0, 1, 1))

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        x = self.conv_out(F.pad(F.silu(self.norm_out(x)), (0, 0, 0, 0, 2, 0)))
        # The first latent frame stands for one frame.
        return x[:, :, self.time_factor - 1 :]


class SpaceTimeVAE(nn.Module):
    """Videos ``[B, 3, T, H, W]`` to latents ``[B, c, f, h, w]`` and back, f = ceil(T / 4).

    Args:
        encoder, decoder: constructor values of ``Encoder`` and ``Decoder``, whose defaults fit the
            released weights.
    """

    def __init__(self, encoder: dict[str, object], decoder: dict[str, object]) -> None:
        super().__init__()
        self.encoder = Encoder(**encoder)  # type: ignore[arg-type]
        self.decoder = Decoder(**decoder)  # type: ignore[arg-type]

    def encode(self, video: Tensor) -> Tensor:
        """The posterior means of the latents of one chunk."""
        return self.encoder(video).chunk(2, dim=1)[0]

    def decode(self, latents: Tensor) -> Tensor:
        """The 4 f - 3 frames of one chunk."""
        return self.decoder(latents)
