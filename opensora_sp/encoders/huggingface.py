"""diffusers' image autoencoder, applied frame by frame.

Legend: B samples, F frames, c latent channels, f x h x w latent size.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora_sp.common.tensors import DTYPES

from .interface import check_latent_frames
from .loading import Dtype, FrozenEncoder, Positive, load_tensors, saved_config

logger = logging.getLogger(__name__)
SD_FACTOR = 8  # pixels per latent position in the autoencoders of Stable Diffusion
# Stable Diffusion's autoencoder, the default.
SD_VAE = dict(
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
    latent_channels=4,
    norm_num_groups=32,
)
# Names in older versions of diffusers.
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


class FrameAutoencoder(nn.Module):
    """An image autoencoder applied to every frame.

    Args:
        micro_batch_size: frames per batch; None for all. Memory grows with it.
    """

    def __init__(self, module: Any, *, scaling_factor: float, micro_batch_size: int | None) -> None:
        super().__init__()
        self.module = module
        self.scaling_factor = scaling_factor
        self.micro_batch_size = micro_batch_size
        self.channels: int = module.config.latent_channels
        self.factor = spatial_factor(module.config.block_out_channels)

    def encode(self, video: Tensor) -> Tensor:
        """``[B, 3, F, height, width]`` -> posterior means ``[B, c, F, h, w]``."""
        parts = [self.module.encode(part).latent_dist.mean for part in self._micro_batches(video)]
        return self._joined(parts, video) * self.scaling_factor

    def decode(self, latents: Tensor) -> Tensor:
        """``[B, c, F, h, w]`` -> ``[B, 3, F, height, width]``."""
        parts = self._micro_batches(latents / self.scaling_factor)
        return self._joined([self.module.decode(part).sample for part in parts], latents)

    def _micro_batches(self, clips: Tensor) -> Sequence[Tensor]:
        """``[B, C, F, H, W]`` -> batches of frames ``[N, C, H, W]``."""
        frames = rearrange(clips, "b c f h w -> (b f) c h w")
        return frames.split(self.micro_batch_size or len(frames))

    def _joined(self, parts: list[Tensor], clips: Tensor) -> Tensor:
        """The inverse, for as many clips."""
        return rearrange(torch.cat(parts), "(b f) c h w -> b c f h w", b=len(clips))


class ImageVAE(FrozenEncoder):
    """diffusers' ``AutoencoderKL`` (Rombach et al., 2022), frame by frame.

    Latents are scaled posterior means.

    Args:
        from_pretrained: local folder, or name on the Hugging Face hub.
        subfolder: folder of the autoencoder inside a pipeline.
        micro_batch_size: frames encoded or decoded in one batch; None for all.
        dtype: "fp32", "bf16" or "fp16" for the weights; latents and videos are float32.
        scaling_factor: factor of the latents; None for the value in the autoencoder's config.json.
        round_down: round sizes that are not multiples of 8 pixels down, as in Open-Sora 1.2; False
            makes them errors, as in Open-Sora 1.0.
        offload: keep the weights on the CPU between calls.

    Raises:
        ValueError: if it cannot be loaded.
    """

    chunk_frames = chunk_latent_frames = 1

    def __init__(
        self,
        from_pretrained: str,
        subfolder: str | None = None,
        micro_batch_size: Positive | None = 8,
        dtype: Dtype = "fp32",
        scaling_factor: float | None = None,
        round_down: bool = True,
        offload: bool = False,
    ) -> None:
        super().__init__(offload=offload)
        from diffusers import AutoencoderKL

        files = self.open_files(from_pretrained, "vae", subfolder)
        if files is None:
            with torch.device("meta"):
                vae = AutoencoderKL.from_config(saved_config(from_pretrained, subfolder) or SD_VAE)
        else:
            config = files.config()
            tensors = {current_name(name): tensor for name, tensor in files.tensors().items()}
            with files.explained("AutoencoderKL"):
                with torch.device("meta"):
                    vae = AutoencoderKL.from_config(config)
                load_tensors(vae, tensors)
        vae.to(DTYPES[dtype])

        scaling_factor = scaling_factor or vae.config.scaling_factor
        self.frames = FrameAutoencoder(
            vae, scaling_factor=scaling_factor, micro_batch_size=micro_batch_size
        )
        self.dtype = DTYPES[dtype]
        self.round_down = round_down
        self.channels = self.frames.channels
        self.micro_batch_size = micro_batch_size
        self.scale = 1 / scaling_factor
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        with self.on_device():
            return self.frames.encode(video.to(self.device, self.dtype)).float()

    @torch.no_grad()
    def decode(self, latents: Tensor, *, num_frames: int) -> Tensor:
        check_latent_frames(latents, num_frames, num_frames)
        with self.on_device():
            return self.frames.decode(latents.to(self.device, self.dtype)).float()

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        return frame_latent_size(
            num_frames, height, width, self.frames.factor, round_down=self.round_down
        )

    @classmethod
    def planned_latent_size(
        cls,
        num_frames: int,
        height: int,
        width: int,
        *,
        from_pretrained: str,
        subfolder: str | None = None,
        round_down: bool = True,
        **_: Any,
    ) -> tuple[int, int, int]:
        """``latent_size`` without loading the autoencoder, from its folder's ``config.json``.

        For a name on the hub it assumes 8 pixels per latent position.
        """
        config = saved_config(from_pretrained, subfolder)
        factor = SD_FACTOR if config is None else spatial_factor(config["block_out_channels"])
        return frame_latent_size(num_frames, height, width, factor, round_down=round_down)


def current_name(name: str) -> str:
    """The name of an autoencoder's tensor in the current version of diffusers."""
    return re.sub(
        r"(?<=attentions\.0\.)\w+", lambda match: OLD_ATTENTION.get(match[0], match[0]), name
    )


def spatial_factor(block_out_channels: Any) -> int:
    """Pixels per latent position of an ``AutoencoderKL``, which downsamples between its blocks."""
    return 2 ** (len(block_out_channels) - 1)


def frame_latent_size(
    num_frames: int, height: int, width: int, factor: int, *, round_down: bool
) -> tuple[int, int, int]:
    """Latent size where every frame stands alone.

    Raises:
        ValueError: if a side does not divide by ``factor`` and is not to be rounded down.
    """
    if not round_down and (height % factor or width % factor):
        raise ValueError(
            f"got frames of {height}x{width} for an autoencoder with {factor} pixels to a latent "
            "position; expected multiples of that; take "
            f"{height - height % factor}x{width - width % factor}, or set vae.round_down=True"
        )
    return num_frames, height // factor, width // factor
