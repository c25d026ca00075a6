"""The encoders of real models: diffusers' image autoencoder applied frame by frame, transformers' T5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora_sp.dtypes import DTYPES


class ImageVAE(nn.Module):
    """diffusers' ``AutoencoderKL`` on every frame by itself; latents are posterior means times its scaling factor.

    Args:
        from_pretrained: local folder, or name on the Hugging Face hub.
        subfolder: folder of the autoencoder inside a pipeline.
        micro_batch_size: frames encoded or decoded at a time.
        dtype: "fp32", "bf16" or "fp16".
    """

    chunk_frames = chunk_latent_frames = 1

    def __init__(
        self, from_pretrained: str, subfolder: str | None = None, micro_batch_size: int = 8, dtype: str = "fp32"
    ) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        self.vae = _load(AutoencoderKL, from_pretrained, "vae", subfolder=subfolder, torch_dtype=DTYPES[dtype])
        self.vae.requires_grad_(False)
        self.micro_batch_size = micro_batch_size
        self.channels: int = self.vae.config.latent_channels
        self.scale = 1 / self.vae.config.scaling_factor
        self.factor = 2 ** (len(self.vae.config.block_out_channels) - 1)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        frames = rearrange(video, "b c f h w -> (b f) c h w").to(self.vae.device, self.vae.dtype)
        parts = [self.vae.encode(part).latent_dist.mode() for part in frames.split(self.micro_batch_size)]
        latents = torch.cat(parts).float() * self.vae.config.scaling_factor
        return rearrange(latents, "(b f) c h w -> b c f h w", b=video.shape[0])

    @torch.no_grad()
    def decode(self, latents: Tensor, *, num_frames: int) -> Tensor:
        frames = rearrange(latents, "b c f h w -> (b f) c h w") / self.vae.config.scaling_factor
        frames = frames.to(self.vae.device, self.vae.dtype)
        video = torch.cat([self.vae.decode(part).sample for part in frames.split(self.micro_batch_size)]).float()
        return rearrange(video, "(b f) c h w -> b c f h w", b=latents.shape[0])[:, :, :num_frames]

    def latent_size(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        return num_frames, height // self.factor, width // self.factor

    @classmethod
    def planned_latent_size(
        cls, num_frames: int, height: int, width: int, *, from_pretrained: str, subfolder: str | None = None, **_: Any
    ) -> tuple[int, int, int]:
        """``latent_size`` of an autoencoder that is not loaded: by its folder's ``config.json``, or, where only a name
        on the hub is known, with 8 pixels to a latent position, as all autoencoders of Stable Diffusion have."""
        described = Path(from_pretrained, subfolder or "", "config.json")
        factor = 8
        if described.is_file():
            factor = 2 ** (len(json.loads(described.read_text())["block_out_channels"]) - 1)
        return num_frames, height // factor, width // factor


class T5TextEncoder(nn.Module):
    """transformers' T5 encoder with its tokenizer; captions are cut at ``max_length`` tokens.

    Args:
        from_pretrained: local folder, or name on the Hugging Face hub.
        max_length: tokens of the padded features.
        dtype: "fp32", "bf16" or "fp16".
    """

    def __init__(self, from_pretrained: str, max_length: int = 300, dtype: str = "fp32") -> None:
        super().__init__()
        from transformers import AutoTokenizer, T5EncoderModel

        self.tokenizer = _load(AutoTokenizer, from_pretrained, "text_encoder")
        self.t5 = _load(T5EncoderModel, from_pretrained, "text_encoder", torch_dtype=DTYPES[dtype])
        self.t5.requires_grad_(False).eval()
        self.width: int = self.t5.config.d_model
        self.max_length = max_length

    @torch.no_grad()
    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        tokens = self.tokenizer(
            texts, max_length=self.max_length, padding="max_length", truncation=True, return_tensors="pt"
        ).to(self.t5.device)
        features = self.t5(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
        return features.float()[:, None], tokens.attention_mask

    def num_tokens(self, text: str) -> int:
        return len(self.tokenizer(text, verbose=False).input_ids)


def _load(cls, source: str, key: str, **options):  # noqa: ANN001, ANN003, ANN202
    """``cls.from_pretrained``, with one error that names the local-folder way."""
    try:
        return cls.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        kind = "folder" if Path(source).is_dir() else "name or folder"
        raise ValueError(
            f"got {key}.from_pretrained {source!r}, a {kind} that {cls.__name__} cannot load ({_first_line(error)}); "
            f"expected a local folder written by save_pretrained, or a hub name with a network to fetch it; set "
            f"{key}.from_pretrained to a folder with the weights"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
