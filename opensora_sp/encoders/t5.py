"""transformers' T5 as a text encoder.

Legend: B samples, L text tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opensora_sp.console import RANK_LOCAL
from opensora_sp.dtypes import DTYPES
from opensora_sp.extras import check_extra
from opensora_sp.transfer import to_device

from .loading import (
    Dtype,
    FrozenEncoder,
    Offload,
    PretrainedFiles,
    check_none_missing,
    saved_config,
)

logger = logging.getLogger(__name__)
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")
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
