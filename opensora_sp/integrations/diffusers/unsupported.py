"""Methods and arguments of other pipelines of diffusers, with what to do instead of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opensora_sp.common.importing import nearest

ADAPTERS = "adapters are merged when it is loaded: from_pretrained(..., lora=['PATH:SCALE'])"
FEATURES = (
    "pass texts as prompt and negative_prompt; other features come from a TextEncoder: "
    "from_pretrained(..., text_encoder=...)"
)
LEVELS = "pass num_inference_steps; pipeline.scheduler has the noise levels, see OpenSoraScheduler"
CAPTIONS = "set max_length or clean_captions under text_encoder_config in model_index.json"
DECODING = "options under vae_config in model_index.json, as micro_batch_size, bound its memory"
# By a part of the name, the first that matches.
ADVICE = {
    "lora": ADAPTERS,
    "adapters": ADAPTERS,
    "attention_kwargs": ADAPTERS,
    "per_prompt": "repeat the prompt: prompt=[TEXT] * NUMBER",
    "embeds": FEATURES,
    "attention_mask": FEATURES,
    "encode_prompt": FEATURES,
    "timesteps": LEVELS,
    "sigmas": LEVELS,
    "max_sequence_length": CAPTIONS,
    "clean_caption": CAPTIONS,
    "vae_slicing": DECODING,
    "vae_tiling": DECODING,
    "callback": "pass callback_on_step_end, which gets the latents and no other tensor",
    "frame_rate": "pass fps",
}


def advice_for(name: str) -> str | None:
    """What to do instead of a method or an argument that other pipelines have."""
    return next((advice for part, advice in ADVICE.items() if part in name), None)


def check_arguments(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Check the arguments of a call that the pipeline does not take.

    None, the default of diffusers' pipelines, passes for their arguments.

    Raises:
        ValueError: for any other.
    """
    names = [*known]
    for name, argument in given.items():
        advice = advice_for(name)
        if advice is not None and argument is None:
            continue
        raise ValueError(
            f"got {name} for a pipeline that does not take it; expected some of {names}; "
            f"{advice or nearest(name, names, otherwise='remove it')}"
        )
