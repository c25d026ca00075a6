"""What other pipelines of diffusers have and this one has not, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opensora_sp.common.importing import nearest

ADAPTERS = "adapters are merged when it is loaded: from_pretrained(..., lora=['PATH:SCALE'])"
FEATURES = (
    "pass texts as prompt and negative_prompt; features of your own come from a TextEncoder: "
    "from_pretrained(..., text_encoder=...)"
)
LEVELS = (
    "pass num_inference_steps; noise levels are those of pipeline.scheduler, see OpenSoraScheduler"
)
DECODING = (
    "the options of the autoencoder under vae_config in model_index.json bound its memory, such "
    "as micro_batch_size"
)
METHODS = {
    **dict.fromkeys(
        (
            *("load_lora_weights", "save_lora_weights", "unload_lora_weights", "set_adapters"),
            *("fuse_lora", "unfuse_lora", "get_active_adapters", "get_list_adapters"),
            *("enable_lora", "disable_lora", "delete_adapters"),
        ),
        ADAPTERS,
    ),
    **dict.fromkeys(
        (
            *("enable_vae_slicing", "disable_vae_slicing", "enable_vae_tiling"),
            "disable_vae_tiling",
        ),
        DECODING,
    ),
    "encode_prompt": FEATURES,
    "tokenizer": "pipeline.text_encoder has its tokenizer",
    "unet": "the model is pipeline.transformer",
}
ARGUMENTS = {
    "num_videos_per_prompt": "repeat the prompt: prompt=[TEXT] * NUMBER",
    "num_images_per_prompt": "repeat the prompt: prompt=[TEXT] * NUMBER",
    **dict.fromkeys(
        (
            *("prompt_embeds", "negative_prompt_embeds", "prompt_attention_mask"),
            *("negative_prompt_attention_mask", "prompt_embeds_mask"),
            "negative_prompt_embeds_mask",
        ),
        FEATURES,
    ),
    "timesteps": LEVELS,
    "sigmas": LEVELS,
    "max_sequence_length": "set max_length under text_encoder_config in model_index.json",
    "clean_caption": "set clean_captions under text_encoder_config in model_index.json",
    "attention_kwargs": ADAPTERS,
    "cross_attention_kwargs": ADAPTERS,
    "callback": "pass callback_on_step_end",
    "callback_steps": "pass callback_on_step_end, which is called after each step",
    "callback_on_step_end_tensor_inputs": "the callback gets the latents and no other tensor",
    "frame_rate": "pass fps",
}


def attribute_error(name: str) -> AttributeError:
    """The error for a name in ``METHODS``."""
    return AttributeError(
        f"got {name!r} of a pipeline; expected an attribute of OpenSoraPipeline, which has none of "
        f"this name; {METHODS[name]}"
    )


def check_arguments(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Check the arguments of a call that the pipeline does not take.

    None, the default of diffusers' pipelines, passes for their arguments.

    Raises:
        ValueError: for any other.
    """
    for name, value in given.items():
        if name in ARGUMENTS and value is None:
            continue
        names = [*known]
        advice = ARGUMENTS.get(name) or nearest(name, names, otherwise="remove it")
        raise ValueError(
            f"got {name} for a pipeline that does not take it; expected some of {names}; {advice}"
        )
