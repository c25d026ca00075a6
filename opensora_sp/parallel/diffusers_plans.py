"""Token plans of diffusers' transformers: read from their ``_cp_plan``, or written here.

Nothing is imported from diffusers. Of its private names, ``_cp_plan`` is read here, and
``dispatch_attention_fn`` replaced in ``attention_calls.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from torch import nn

from .token_plan import Cut, TokenPlan

OLDEST = [0, 42]
TOKENS = Cut(1, 3)
TIMESTEPS = Cut(1, 2)  # one for each token


def plan_of_diffusers(model: nn.Module) -> TokenPlan:
    """The plan of a transformer of diffusers.

    Raises:
        ValueError: if its class has none that is known to be right, or its settings have none, or
            diffusers is older than the plans.
    """
    # Of a derived class, such as fully_shard makes, the plan of its base.
    names = [base.__name__ for base in type(model).__mro__]
    name = next((name for name in names if name in PLANS or name in STATED), names[0])
    installed = version("diffusers")
    if [int(number) for number in installed.split(".")[:2]] < OLDEST:
        raise ValueError(
            f"got diffusers {installed}; expected 0.42 or later, whose plans are tested; pip "
            "install -U diffusers"
        )
    if name in PLANS:
        return PLANS[name](model)
    stated: Any = getattr(model, "_cp_plan", None)
    if name not in STATED or not stated:
        raise ValueError(
            f"got a model of class {name}; expected one of {sorted({*PLANS, *STATED})}, whose "
            f"plans are tested with diffusers 0.42; call register_plan({name}, TokenPlan(...))"
        )
    if getattr(model.config, "is_amplify_history", False):
        _refuse(name, "is_amplify_history", "the first tokens of a rank would be taken for history")
    return read_plan(model, stated)


def read_plan(model: nn.Module, stated: Mapping[str, Any]) -> TokenPlan:
    """The plan that diffusers states for its own context parallelism."""
    inputs: dict[str, dict[str, Cut]] = {}
    outputs: dict[str, dict[int, Cut]] = {}
    gather: dict[str, tuple[int | None, ...]] = {}
    modules = dict(model.named_modules())
    for pattern, parts in stated.items():
        # Plans name 40 blocks of a model that may have fewer.
        if not any(_matches(pattern, module) for module in modules):
            continue
        if not isinstance(parts, dict):
            listed = parts if isinstance(parts, list | tuple) else (parts,)
            gather[pattern] = tuple(None if part is None else part.gather_dim for part in listed)
            continue
        for name, part in parts.items():
            first = part[0] if isinstance(part, list | tuple) else part
            cut = first if isinstance(first, Cut) else Cut(first.split_dim, first.expected_dims)
            if isinstance(name, int):
                outputs.setdefault(pattern, {})[name] = cut
            else:
                inputs.setdefault(pattern, {})[name] = cut
    return TokenPlan(inputs=inputs, outputs=outputs, gather=gather, attention=attentions(model))


def _refuse(name: str, setting: str, reason: str) -> None:
    raise ValueError(
        f"got a {name} with {setting}; expected one without: it counts tokens of the whole "
        f"sequence, so that {reason}; use another model, or sp_size=1"
    )


def attentions(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that attend by a processor."""
    return tuple(name for name, module in model.named_modules() if hasattr(module, "processor"))


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _ltx(model: Any) -> TokenPlan:
    """Its own plan cuts the text, which is only attended to, and no timesteps of single tokens."""
    inputs = {"hidden_states": TOKENS, "timestep": TIMESTEPS}
    return read_plan(model, {**model._cp_plan, "": inputs})


def _ltx2(model: Any) -> TokenPlan:
    """Its own plan cuts the text, but neither the audio nor three of the rotary tables (diffusers
    issues 14316 and 14317). Attention from audio to video, and back, is between two cut streams.
    """
    split = model.config.rope_type == "split"
    table = Cut(2, 4) if split else Cut(1, 3)
    ropes = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
    return TokenPlan(
        inputs={
            "": {"timestep": TIMESTEPS, "audio_timestep": TIMESTEPS},
            "transformer_blocks.0": {"hidden_states": TOKENS, "audio_hidden_states": TOKENS},
        },
        outputs={name: {0: table, 1: table} for name in ropes},
        gather={"proj_out": (1,), "audio_proj_out": (1,)},
        attention=attentions(model),
        streams=("hidden_states", "audio_hidden_states"),
        contexts={
            "transformer_blocks.*.audio_to_video_attn": "audio_hidden_states",
            "transformer_blocks.*.video_to_audio_attn": "hidden_states",
        },
    )


def _hunyuan_video(model: Any) -> TokenPlan:
    """Its mask covers video and text; rotary tables cover the video."""
    if model.config.image_condition_type == "token_replace":
        name = type(model).__name__
        _refuse(name, "image_condition_type='token_replace'", "each rank would replace its first")
    streams = ("hidden_states", "encoder_hidden_states")
    mask, rotary = Cut(3, 4, streams), Cut(0, 2)
    first = {"hidden_states": TOKENS, "encoder_hidden_states": TOKENS}
    return TokenPlan(
        inputs={
            "transformer_blocks.0": first,
            "transformer_blocks.*": {"attention_mask": mask, "freqs_cis": rotary},
            "single_transformer_blocks.*": {"attention_mask": mask, "image_rotary_emb": rotary},
        },
        gather={"proj_out": (1,)},
        attention=attentions(model),
        streams=streams,
    )


def _cogvideox(model: Any) -> TokenPlan:
    """Its rotary tables are arguments of each block."""
    first = {"hidden_states": TOKENS, "encoder_hidden_states": TOKENS}
    return TokenPlan(
        inputs={
            "transformer_blocks.0": first,
            "transformer_blocks.*": {"image_rotary_emb": Cut(0, 2)},
        },
        gather={"proj_out": (1,)},
        attention=attentions(model),
    )


PLANS: dict[str, Callable[[Any], TokenPlan]] = {
    "LTXVideoTransformer3DModel": _ltx,
    "LTX2VideoTransformer3DModel": _ltx2,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "CogVideoXTransformer3DModel": _cogvideox,
}
STATED = (
    "WanTransformer3DModel",
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "ChronoEditTransformer3DModel",
    "HeliosTransformer3DModel",
    "MiniMaxH3Transformer3DModel",
)
