"""Token plans of diffusers' transformers: read from their ``_cp_plan``, or written here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from opensora_sp.parallel.token_plan import Cut, TokenPlan

TOKENS = Cut(1, 3)


def plan_of_diffusers(model: nn.Module) -> TokenPlan:
    """The plan of a transformer of diffusers.

    Raises:
        ValueError: if its class has none that is known to be right.
    """
    name = type(model).__name__
    if name in PLANS:
        return PLANS[name](model)
    stated = getattr(model, "_cp_plan", None)
    if not stated or name not in STATED:
        raise ValueError(
            f"got a model of class {name}; expected one of {sorted({*PLANS, *STATED})}, whose plans "
            "are tested; pass register_plan a TokenPlan for it"
        )
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
            cut = Cut(first.split_dim, first.expected_dims)
            if isinstance(name, int):
                outputs.setdefault(pattern, {})[name] = cut
            else:
                inputs.setdefault(pattern, {})[name] = cut
    return TokenPlan(inputs=inputs, outputs=outputs, gather=gather, attention=attentions(model))


def attentions(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules that attend by a processor."""
    return tuple(name for name, module in model.named_modules() if hasattr(module, "processor"))


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _ltx(model: nn.Module) -> TokenPlan:
    """Its own plan cuts the text, which is only attended to."""
    stated = {**model._cp_plan, "": {"hidden_states": model._cp_plan[""]["hidden_states"]}}
    return read_plan(model, stated)


def _hunyuan_video(model: nn.Module) -> TokenPlan:
    """Its mask covers video and text; rotary tables cover the video."""
    streams = ("hidden_states", "encoder_hidden_states")
    mask = Cut(3, 4, streams)
    rotary = Cut(0, 2)
    first = {"hidden_states": TOKENS, "encoder_hidden_states": TOKENS}
    every = {"attention_mask": mask, "freqs_cis": rotary, "image_rotary_emb": rotary}
    return TokenPlan(
        inputs={
            "transformer_blocks.0": first,
            "transformer_blocks.*": {k: every[k] for k in ("attention_mask", "freqs_cis")},
            "single_transformer_blocks.*": {
                k: every[k] for k in ("attention_mask", "image_rotary_emb")
            },
        },
        gather={"proj_out": (1,)},
        attention=attentions(model),
        streams=streams,
    )


def _cogvideox(model: nn.Module) -> TokenPlan:
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
