"""The video autoencoder of Open-Sora 1.2: image and temporal autoencoder, in chunks of 17 frames.

Legend: B samples, F frames of video, c latent channels, f x h x w latent size; ``height = 8 h``,
``width = 8 w``.

    video  [B, 3, F, height, width]   chunks of 17 frames, the last one shorter; each independently:
      | AutoencoderKL, frame by frame, in micro-batches; times 0.18215
      v [B, c, 17, h, w]
      | TemporalVAE, after three frames of zeros
      v [B, c, 5, h, w]
      | (z - shift) / scale
      v
    latents [B, c, f, h, w]           the chunks one after the other
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opensora_sp.common.tensors import DTYPES

from .huggingface import SD_VAE, FrameAutoencoder, current_name, spatial_factor
from .interface import check_latent_frames, independent_pieces
from .loading import Dtype, FrozenEncoder, Positive, PretrainedFiles, load_strictly, saved_config
from .video_vae import TemporalVAE

TIME_FACTOR, SPATIAL_FACTOR = 4, 8
# The release ignores the scaling factor in the image autoencoder's configuration.
IMAGE_LATENT_FACTOR = 0.18215


class ChunkVAE(nn.Module):
    """The autoencoder of one chunk; tensors are named as in the released weights."""

    scale: Tensor
    shift: Tensor

    def __init__(
        self, image_vae: Any, temporal_vae: TemporalVAE, *, micro_batch_size: int | None
    ) -> None:
        super().__init__()
        channels = image_vae.config.latent_channels
        self.register_buffer("scale", torch.ones(1, channels, 1, 1, 1))
        self.register_buffer("shift", torch.zeros(1, channels, 1, 1, 1))
        self.spatial_vae = FrameAutoencoder(
            image_vae, scaling_factor=IMAGE_LATENT_FACTOR, micro_batch_size=micro_batch_size
        )
        self.temporal_vae = temporal_vae

    def encode(self, video: Tensor) -> Tensor:
        means = self.temporal_vae.encode(self.spatial_vae.encode(video))
        return (means.to(self.scale.dtype) - self.shift) / self.scale

    def decode(self, latents: Tensor, *, num_frames: int) -> Tensor:
        dtype = next(self.temporal_vae.quant_conv.parameters()).dtype
        z = (latents * self.scale + self.shift).to(dtype)
        return self.spatial_vae.decode(self.temporal_vae.decode(z, num_frames=num_frames))


class OpenSoraVAE(FrozenEncoder):
    """``OpenSoraVAE_V1_2``, the autoencoder of the released STDiT3 (Zheng et al., 2024, Open-Sora).

    Latents are posterior means; the release draws samples.

    Args:
        from_pretrained: local folder with the release's ``config.json`` and ``model.safetensors``,
            or a hub name.
        micro_frame_size: frames of a chunk; None takes a clip as one.
        micro_batch_size: batch size of the image autoencoder in frames; None is a whole chunk.
        dtype: "fp32", "bf16" or "fp16" for the weights; latents and videos are float32, and so are
            shift and scale.
        offload: keep the weights on the CPU between calls.

    Raises:
        ValueError: if it cannot be found, or has other tensors than this autoencoder.
    """

    def __init__(
        self,
        from_pretrained: str,
        micro_frame_size: Positive | None = 17,
        micro_batch_size: Positive | None = 4,
        dtype: Dtype = "fp32",
        offload: bool = False,
    ) -> None:
        super().__init__(offload=offload)
        files = self.open_files(from_pretrained, "vae")
        release = (saved_config(from_pretrained) or {}) if files is None else files.config()
        # Built on the meta device, since the file has all weights.
        with torch.device("meta"):
            image_vae, temporal_vae = build_parts(release, from_pretrained)
            self.chunk_vae = ChunkVAE(image_vae, temporal_vae, micro_batch_size=micro_batch_size)
        if files is not None:
            load_chunk_vae(self.chunk_vae, files)

        self.dtype = DTYPES[dtype]
        # Each alone: shift and scale stay float32.
        self.chunk_vae.spatial_vae.to(self.dtype)
        self.chunk_vae.temporal_vae.to(self.dtype)

        self.channels = self.chunk_vae.spatial_vae.channels
        self.chunk_frames = micro_frame_size
        self.chunk_latent_frames = None
        if micro_frame_size is not None:
            self.chunk_latent_frames = math.ceil(micro_frame_size / TIME_FACTOR)
        self.requires_grad_(False).eval()

    @property
    def scale(self) -> Tensor:
        return self.chunk_vae.get_buffer("scale")

    @property
    def shift(self) -> Tensor:
        return self.chunk_vae.get_buffer("shift")

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """``[B, 3, F, height, width]`` in [-1, 1], any number of frames -> ``[B, c, f, h, w]``."""
        num_frames, height, width = video.shape[2:]
        latent_frames, *_ = self.latent_size(num_frames, height, width)
        pieces = independent_pieces(self, num_frames=num_frames, latent_frames=latent_frames)

        parts = []
        with self.on_device():
            for piece in pieces:
                frames = video[:, :, piece.frames].to(self.device, self.dtype)
                parts.append(self.chunk_vae.encode(frames).float())
        return torch.cat(parts, dim=2)

    @torch.no_grad()
    def decode(self, latents: Tensor, *, num_frames: int) -> Tensor:
        """``[B, c, f, h, w]`` -> ``[B, 3, num_frames, height, width]``, about within [-1, 1].

        Raises:
            ValueError: if ``num_frames`` frames have another number of latent frames.
        """
        check_latent_frames(latents, num_frames, _latent_frames(num_frames, self.chunk_frames))
        pieces = independent_pieces(self, num_frames=num_frames, latent_frames=latents.shape[2])

        parts = []
        with self.on_device():
            for piece in pieces:
                z = latents[:, :, piece.latents].to(self.device, self.scale.dtype)
                length = piece.frames.stop - piece.frames.start
                parts.append(self.chunk_vae.decode(z, num_frames=length).float())
        return torch.cat(parts, dim=2)

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        return self.planned_latent_size(
            num_frames, height, width, micro_frame_size=self.chunk_frames
        )

    @classmethod
    def planned_latent_size(
        cls,
        num_frames: int,
        height: int,
        width: int,
        *,
        micro_frame_size: int | None = 17,
        **_: Any,
    ) -> tuple[int, int, int]:
        """``latent_size`` without weights: each chunk is rounded up, height and width down."""
        latent_frames = _latent_frames(num_frames, micro_frame_size)
        return latent_frames, height // SPATIAL_FACTOR, width // SPATIAL_FACTOR


def _latent_frames(num_frames: int, micro_frame_size: int | None) -> int:
    whole, rest = divmod(num_frames, micro_frame_size or num_frames or 1)
    return whole * -(-(micro_frame_size or num_frames) // TIME_FACTOR) + -(-rest // TIME_FACTOR)


def build_parts(release: dict[str, Any], source: str) -> tuple[Any, TemporalVAE]:
    """The image and the temporal autoencoder of a released ``config.json``, without weights.

    Its ``vae_2d`` names the image autoencoder that training started from. Its ``config.json`` is
    used if it is a local folder, or one in ``source``; the default is Stable Diffusion's.
    ``vae_temporal`` has constructor values.

    Raises:
        ValueError: for unknown values, or another autoencoder than Open-Sora 1.2's.
    """
    from diffusers import AutoencoderKL

    image_vae = AutoencoderKL.from_config(_image_config(release, source) or SD_VAE)

    options = dict(release.get("vae_temporal") or {})
    options.pop("from_pretrained", None)
    # The released preset has another value than the default of the class.
    if options.pop("type", None) == "VAE_Temporal":
        options.setdefault("temporal_downsample", (True, True, False))

    try:
        temporal_vae = TemporalVAE(**options)
    except TypeError as error:
        raise ValueError(
            f"got vae_temporal {options} in the config.json of {source} ({error}); expected the "
            "constructor values of VAE_Temporal; correct it"
        ) from error

    factors = temporal_vae.time_factor, spatial_factor(image_vae.config.block_out_channels)
    if factors != (TIME_FACTOR, SPATIAL_FACTOR):
        raise ValueError(
            f"got an autoencoder in {source} with {factors[0]} frames and {factors[1]} pixels to a "
            f"latent position; expected {TIME_FACTOR} and {SPATIAL_FACTOR}, as in Open-Sora 1.2; "
            "choose another vae.from_pretrained"
        )
    return image_vae, temporal_vae


def _image_config(release: dict[str, Any], source: str) -> dict[str, Any] | None:
    image_vae = release.get("vae_2d") or {}
    name = image_vae.get("from_pretrained")
    if not name:
        return None
    subfolder = image_vae.get("subfolder")
    return saved_config(Path(source, name), subfolder) or saved_config(Path(name), subfolder)


def load_chunk_vae(chunk_vae: ChunkVAE, files: PretrainedFiles) -> None:
    """Load weights, whose names and shapes must be as in ``chunk_vae``.

    Raises:
        ValueError: if they are not.
    """
    state = {current_name(name): tensor for name, tensor in files.tensors().items()}

    # Scale and shift may be one number for all channels.
    for name in ("scale", "shift"):
        if name in state and state[name].ndim == 0:
            state[name] = state[name].expand_as(chunk_vae.get_buffer(name)).contiguous()
    load_strictly(chunk_vae, state, files, "OpenSoraVAE_V1_2")

    # Shift and scale are float32, whatever the weights are.
    chunk_vae.scale, chunk_vae.shift = chunk_vae.scale.float(), chunk_vae.shift.float()
