"""transformers' T5 as a text encoder.

Legend: B samples, L text tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opensora_sp.common.console import RANK_LOCAL
from opensora_sp.common.importing import check_extra
from opensora_sp.common.tensors import DTYPES, to_device

from .loading import Dtype, FrozenEncoder, Offload, PretrainedFiles, load_tensors, saved_config

logger = logging.getLogger(__name__)
# T5's vocabularies begin with these.
SPECIAL_TOKENS = {"<pad>": 0, "</s>": 1}
PAD, END = SPECIAL_TOKENS.values()
Tokenizer = Callable[[str], list[int]]
"""Turns a text into ids of tokens, without the end token."""
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
        if clean_captions and not self.is_planned:
            check_cleaning()
        files = self.open_files(from_pretrained, "text_encoder")
        if files is None:
            self.t5 = planned_t5(saved_config(from_pretrained) or T5_XXL).to(DTYPES[dtype])
        else:
            self.tokenizer = load_tokenizer(files)
            self.t5 = load_t5(files, DTYPES[dtype])
        self.width: int = self.t5.config.d_model
        self.max_length, self.clean_captions = max_length, clean_captions
        self._has_warned = False
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        texts = [self._cleaned(text) for text in texts]
        tokens = [self.tokenizer(text) for text in texts]
        self._warn_once_of_truncation(texts, tokens)

        ids = torch.full((len(texts), self.max_length), PAD)
        mask = torch.zeros_like(ids)
        for row, text_tokens in enumerate(tokens):
            # A truncated caption ends as any other.
            kept = [*text_tokens[: self.max_length - 1], END]
            ids[row, : len(kept)] = torch.tensor(kept)
            mask[row, : len(kept)] = 1
        return self.features(to_device(ids, self.device), to_device(mask, self.device)), mask

    @torch.no_grad()
    def features(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Features float32 ``[B, 1, L, width]`` of tokens ``[B, L]`` on the device."""
        # Added to the scores. Of a mask [B, L] transformers would ask whether it hides anything,
        # which waits for the device, and the meta device has no answer.
        scores = torch.zeros(mask.shape, dtype=self.t5.dtype, device=mask.device)
        scores = scores.masked_fill(mask == 0, torch.finfo(self.t5.dtype).min)[:, None, None]
        with self.on_device():
            features = self.t5(input_ids=ids, attention_mask=scores).last_hidden_state
        return features.float()[:, None]

    def _cleaned(self, text: str) -> str:
        return clean_caption(text) if self.clean_captions else text

    def _warn_once_of_truncation(self, texts: list[str], tokens: list[list[int]]) -> None:
        longest = max(range(len(texts)), key=lambda i: len(tokens[i]))
        # With the end token.
        length = len(tokens[longest]) + 1
        if length > self.max_length and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a caption of %d tokens is truncated to text_encoder.max_length = %d (logged "
                "once): %.80s...",
                length,
                self.max_length,
                texts[longest],
                extra=RANK_LOCAL,
            )

    def num_tokens(self, text: str) -> int:
        """Tokens of a caption before truncation, with the end token."""
        return len(self.tokenizer(self._cleaned(text))) + 1


def load_tokenizer(files: PretrainedFiles) -> Tokenizer:
    """The tokenizer of a T5: its ``spiece.model``, or else its ``tokenizer.json``.

    Neither is read by transformers: of a ``spiece.model``, version 5.0 leaves the normalization of
    characters out, and all of version 5 need protobuf for it.

    Raises:
        ValueError: if it cannot be loaded, or its special tokens are not T5's.
    """
    pieces, description = files.folder / "spiece.model", files.folder / "tokenizer.json"
    special: dict[str, int | None]
    tokenizer: Tokenizer
    with files.explained("its tokenizer"):
        if pieces.is_file():
            from sentencepiece import SentencePieceProcessor

            processor = SentencePieceProcessor(model_file=str(pieces))
            special = {token: processor.piece_to_id(token) for token in SPECIAL_TOKENS}
            tokenizer = processor.encode
        elif description.is_file():
            from tokenizers import Tokenizer as Described

            described = Described.from_file(str(description))
            described.no_truncation()
            described.no_padding()
            special = {token: described.token_to_id(token) for token in SPECIAL_TOKENS}

            def tokenizer(text: str) -> list[int]:
                return described.encode(text, add_special_tokens=False).ids
        else:
            raise ValueError(f"it has neither {pieces.name} nor {description.name}")

        if special != SPECIAL_TOKENS:
            raise ValueError(f"its special tokens are {special}, and T5's {SPECIAL_TOKENS}")
    return tokenizer


def planned_t5(config: dict[str, Any]) -> Any:
    """The network of a T5 encoder on the meta device.

    Args:
        config: content of its ``config.json``.
    """
    from transformers import T5Config, T5EncoderModel

    # Attention is not fused: kernels differ in memory, and version 5.0 of transformers has none.
    settings = T5Config.from_dict(config, attn_implementation="eager")
    with torch.device("meta"):
        t5: Any = T5EncoderModel(settings)
    # Version 5.0 of transformers ties weights when it loads them, and not before.
    t5.tie_weights()
    return t5


def load_t5(files: PretrainedFiles, dtype: torch.dtype) -> Any:
    """The network of a T5 encoder.

    Raises:
        ValueError: if a count of its ``config.json`` is too large, or a tensor is missing or has
            another shape.
    """
    config, tensors = files.config(), files.tensors()
    with files.explained("T5EncoderModel"):
        for key, largest in MAX_COUNTS.items():
            if config.get(key, 0) > largest:
                raise ValueError(
                    f"{key} {config[key]} in its config.json, which may be {largest} at most"
                )
        t5 = planned_t5(config)
        # Tied in T5: a file has one of the names, or both.
        embedding = tensors.get("shared.weight", tensors.get("encoder.embed_tokens.weight"))
        if embedding is not None:
            tensors |= {"shared.weight": embedding, "encoder.embed_tokens.weight": embedding}
        load_tensors(t5, tensors)
        t5.tie_weights()

    for name, parameter in t5.named_parameters():
        # The products of this layer overflow in fp16.
        stays_fp32 = dtype == torch.float16 and ".wo." in name
        parameter.data = parameter.data.to(torch.float32 if stays_fp32 else dtype)
    return t5


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

    DeepFloyd IF in diffusers has the rules; Open-Sora applied them twice in training.
    """
    from diffusers.pipelines.deepfloyd_if import IFPipeline

    for _ in range(2):
        # The method reads only a class attribute of its instance.
        text = IFPipeline._clean_caption(IFPipeline, text)
    return text
