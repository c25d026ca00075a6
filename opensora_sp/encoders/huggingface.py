"""Pretrained encoders: diffusers' image autoencoder applied frame by frame, transformers' T5.

Legend: B samples, F frames, c latent channels, f x h x w latent size, L text tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from opensora_sp.console import RANK_LOCAL
from opensora_sp.dtypes import DTYPES
from opensora_sp.extras import check_extra
from opensora_sp.transfer import to_device

from .base import check_latent_frames
from .loading import (
    Dtype,
    FrozenEncoder,
    Offload,
    PretrainedFiles,
    check_none_missing,
    load_tensors,
    saved_config,
)

logger = logging.getLogger(__name__)
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")
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
# T5 v1.1 XXL, the text encoder of the releases, for plans without its folder.
T5_XXL = dict(
    vocab_size=32128,
    d_model=4096,
    d_kv=64,
    d_ff=10240,
    num_layers=24,
    num_heads=64,
    feed_forward_proj="gated-gelu",
    dense_act_fn="gelu_new",
    is_gated_act=True,
)
# Largest counts of a T5's config.json: modules and labels are built before weights are looked at.
MAX_COUNTS = {"num_layers": 1000, "num_hidden_layers": 1000, "num_labels": 1000}
# Tied in T5: a file has one of the names, or both.
TIED_NAMES = {"encoder.embed_tokens.weight": "shared.weight"}
# Names in older versions of diffusers.
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


class FrameAutoencoder(nn.Module):
    """An image autoencoder applied to every frame.

    Args:
        module: diffusers' ``AutoencoderKL``.
        scaling_factor: factor of its latents.
        micro_batch_size: frames per batch; None for all. Memory grows with it.
    """

    def __init__(self, module: Any, *, scaling_factor: float, micro_batch_size: int | None) -> None:
        super().__init__()
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(
                f"got micro_batch_size {micro_batch_size}; expected >= 1; change "
                "vae.micro_batch_size"
            )
        self.module = module
        self.scaling_factor = scaling_factor
        self.micro_batch_size = micro_batch_size
        self.channels: int = module.config.latent_channels
        self.factor = spatial_factor(module.config.block_out_channels)

    def encode(self, video: Tensor, noise: Tensor | None = None) -> Tensor:
        """``[B, 3, F, height, width]`` -> ``[B, c, F, h, w]``: posterior means, or samples.

        Args:
            noise: standard normal ``[B, c, F, h, w]`` for samples; None for means.
        """
        parts = [self.module.encode(part).latent_dist for part in self._micro_batches(video)]
        latents = self._joined([part.mean for part in parts], video)
        if noise is not None:
            latents = latents + self._joined([part.std for part in parts], video) * noise
        return latents * self.scaling_factor

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
        scaling_factor: factor of the latents; None for that of the autoencoder's configuration.
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
        micro_batch_size: int | None = 8,
        dtype: Dtype = "fp32",
        scaling_factor: float | None = None,
        round_down: bool = True,
        offload: bool = False,
    ) -> None:
        super().__init__(offload=offload)
        self._build(
            PretrainedFiles(from_pretrained, "vae", subfolder),
            from_pretrained=from_pretrained,
            subfolder=subfolder,
            micro_batch_size=micro_batch_size,
            dtype=dtype,
            scaling_factor=scaling_factor,
            round_down=round_down,
        )
        self.requires_grad_(False).eval()

    def _build(
        self,
        files: PretrainedFiles | None,
        *,
        from_pretrained: str,
        subfolder: str | None,
        micro_batch_size: int | None,
        dtype: Dtype,
        scaling_factor: float | None,
        round_down: bool,
        **_: Any,
    ) -> None:
        from diffusers import AutoencoderKL

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


class T5TextEncoder(FrozenEncoder):
    """transformers' T5 encoder (Raffel et al., 2020) with its tokenizer.

    Captions are truncated to ``max_length`` tokens.

    Args:
        from_pretrained: local folder, or name on the Hugging Face hub.
        max_length: tokens of the padded features.
        dtype: "fp32", "bf16" or "fp16" for the weights; features are float32.
        clean_captions: clean captions as in training the released models, see ``clean_caption``.
        offload: keep the weights on the CPU between calls; "layers" copies one layer at a time.

    Raises:
        ValueError: if it cannot be loaded, or packages to clean captions are not installed.
    """

    def __init__(
        self,
        from_pretrained: str,
        max_length: int = 300,
        dtype: Dtype = "fp32",
        clean_captions: bool = False,
        offload: Offload = False,
    ) -> None:
        super().__init__(offload=offload)
        if clean_captions:
            check_cleaning()
        self._build(
            PretrainedFiles(from_pretrained, "text_encoder"),
            from_pretrained=from_pretrained,
            max_length=max_length,
            dtype=dtype,
            clean_captions=clean_captions,
        )
        self.requires_grad_(False).eval()

    def _build(
        self,
        files: PretrainedFiles | None,
        *,
        from_pretrained: str,
        max_length: int,
        dtype: Dtype,
        clean_captions: bool,
        **_: Any,
    ) -> None:
        if files is None:
            from transformers import T5Config, T5EncoderModel

            config = T5Config.from_dict(saved_config(from_pretrained) or T5_XXL)
            with torch.device("meta"):
                t5: Any = T5EncoderModel(config)
            self.t5 = t5.to(DTYPES[dtype])
        else:
            self.tokenizer = load_tokenizer(files)
            self.t5 = load_t5(files, DTYPES[dtype])
        self.width: int = self.t5.config.d_model
        self.max_length, self.clean_captions = max_length, clean_captions
        self._has_warned = False

    @torch.no_grad()
    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        texts = [self._cleaned(text) for text in texts]
        self._warn_once_of_truncation(texts)
        tokens = self.tokenizer(
            texts,
            max_length=self.max_length,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        ids = to_device(tokens.input_ids, self.device)
        mask = to_device(tokens.attention_mask, self.device)
        return self.features(ids, mask), tokens.attention_mask

    @torch.no_grad()
    def features(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Features float32 ``[B, 1, L, width]`` of tokens ``[B, L]`` on the device."""
        with self.on_device():
            features = self.t5(input_ids=ids, attention_mask=mask).last_hidden_state
        return features.float()[:, None]

    def _cleaned(self, text: str) -> str:
        return clean_caption(text) if self.clean_captions else text

    def _warn_once_of_truncation(self, texts: list[str]) -> None:
        if self._has_warned:
            return

        lengths = [len(ids) for ids in self.tokenizer(texts, verbose=False).input_ids]
        longest = max(range(len(texts)), key=lengths.__getitem__)
        if lengths[longest] > self.max_length:
            self._has_warned = True
            logger.warning(
                "a caption of %d tokens is truncated to text_encoder.max_length = %d (logged "
                "once): %.80s...",
                lengths[longest],
                self.max_length,
                texts[longest],
                extra=RANK_LOCAL,
            )

    def num_tokens(self, text: str) -> int:
        """Tokens of a caption before truncation, with the end token."""
        return len(self.tokenizer(self._cleaned(text), verbose=False).input_ids)


def load_tokenizer(files: PretrainedFiles) -> Any:
    """The tokenizer of a T5.

    Raises:
        ValueError: if it cannot be loaded.
    """
    from transformers import T5TokenizerFast

    with files.explained("its tokenizer"):
        # AutoTokenizer would take the class that the folder names, and some read pickles.
        if not any((files.folder / name).is_file() for name in TOKENIZER_FILES):
            raise ValueError(f"it has none of {', '.join(TOKENIZER_FILES)}")
        return T5TokenizerFast.from_pretrained(
            str(files.folder),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )


def load_t5(files: PretrainedFiles, dtype: torch.dtype) -> Any:
    """The network of a T5 encoder.

    Raises:
        ValueError: if it cannot be loaded.
    """
    from transformers import T5Config, T5EncoderModel

    config, tensors = files.config(), files.tensors()
    with files.explained("T5EncoderModel"):
        check_t5_weights(config, tensors)
        t5, found = T5EncoderModel.from_pretrained(
            # No path: transformers reads no file.
            None,
            config=T5Config.from_dict(config),
            state_dict=tensors,
            torch_dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
        check_none_missing(found["missing_keys"])
    return t5


def check_t5_weights(config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Compare weights with a T5 encoder on the meta device, before memory is allocated for one.

    Args:
        config: content of its ``config.json``.

    Raises:
        ValueError: if a count of the config is too large, or a tensor is missing or has another
            shape.
    """
    from transformers import T5Config, T5EncoderModel

    for key, largest in MAX_COUNTS.items():
        if config.get(key, 0) > largest:
            raise ValueError(
                f"{key} {config[key]} in its config.json, which may be {largest} at most"
            )

    with torch.device("meta"):
        model: Any = T5EncoderModel(T5Config.from_dict(config))
    shapes = {TIED_NAMES.get(name, name): tensor.shape for name, tensor in tensors.items()}
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    check_none_missing([name for name in wanted if name not in shapes])

    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ValueError(
                f"{name} has shape {[*shapes[name]]}, and {[*shape]} by its config.json"
            )


def check_cleaning() -> None:
    """Raise ValueError unless the packages that ``clean_caption`` needs are installed."""
    check_extra(
        "captions",
        *("bs4", "ftfy"),
        setting="text_encoder.clean_captions=True",
        instead="set it to False, which keeps captions as they are",
    )


def clean_caption(text: str) -> str:
    """A caption in lower case without URLs, markup, article numbers, file names and the like.

    The rules are those of DeepFloyd IF in diffusers; Open-Sora applied them twice in training.
    """
    from diffusers.pipelines.deepfloyd_if import IFPipeline

    for _ in range(2):
        # The method reads only a class attribute of its instance.
        text = IFPipeline._clean_caption(IFPipeline, text)
    return text
