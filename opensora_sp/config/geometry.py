"""Checks that clips, autoencoder, text encoder and model fit together, without building them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from opensora_sp.checkpoint.model_config import check_text_length
from opensora_sp.common.importing import component_class
from opensora_sp.data import ClipShape, ExtraFiles
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS, planned_latent_size
from opensora_sp.models.extra_inputs import cut_as_frames, extra_shapes

from .components import split_type
from .model_spec import ModelSpec


def latent_size(vae: dict[str, Any], clip: ClipShape) -> tuple[int, int, int] | None:
    """Frames, height and width of a clip's latents; None if only a built autoencoder knows."""
    cls = component_class("vae", vae["type"], LATENT_ENCODERS)
    if vae["type"] not in LATENT_ENCODERS and not hasattr(cls, "planned_latent_size"):
        return None
    return planned_latent_size(vae, *clip)


@dataclass(frozen=True)
class _Shapes:
    """The shapes of a model's further inputs for a clip; workers of a loader get a copy."""

    spec: ModelSpec
    vae: dict[str, Any]

    def __call__(self, clip: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
        inputs, latents = self.spec.model_class.extra_inputs, planned_latent_size(self.vae, *clip)
        return extra_shapes(inputs, self.spec.config, clip[0], latents)


def extra_files(spec: ModelSpec, vae: dict[str, Any]) -> ExtraFiles | None:
    """How the further inputs of a model are read; None if it has none."""
    inputs = spec.model_class.extra_inputs
    if not inputs:
        return None
    return ExtraFiles(tuple(inputs), cut_as_frames(inputs), _Shapes(spec, vae))


def check_latents(vae: dict[str, Any], clip: ClipShape) -> None:
    """Raise ValueError if clips are too small for the autoencoder."""
    latents = latent_size(vae, clip)
    if latents is not None and min(latents) < 1:
        raise ValueError(
            f"got {_text(clip)}, of which the vae {vae['type']!r} makes "
            f"latents of {latents}; expected at least one in each dimension; enlarge the frames"
        )


def check_input_size(
    input_size: tuple[int, int, int] | None, vae: dict[str, Any], clip: ClipShape
) -> None:
    """Raise ValueError if a model's ``input_size`` differs from the latent size of the clips."""
    latents = latent_size(vae, clip)
    if input_size is not None and latents is not None and input_size != tuple(latents):
        raise ValueError(
            f"got {_text(clip)}, latents of {latents}, and model.input_size "
            f"{input_size}; expected the same; remove input_size, which is then that of the "
            "clips, or change the clips"
        )


def _text(clip: ClipShape) -> str:
    frames, height, width = clip
    return f"{frames} frames of {height}x{width} pixels (num_frames, image_size)"


def check_text(text_encoder: dict[str, Any], model_config: Any) -> None:
    """Raise ValueError if a model cannot take the features of a text encoder."""
    if getattr(model_config, "skip_y_embedder", False):
        raise ValueError(
            "got model.skip_y_embedder=True, for text features that are projected already; "
            "expected False, since text comes from text_encoder; remove it"
        )

    name, options = split_type("text_encoder", text_encoder)
    parameters = inspect.signature(component_class("text_encoder", name, TEXT_ENCODERS)).parameters
    default = getattr(parameters.get("max_length"), "default", None)
    length = options.get("max_length", default)
    if isinstance(length, int):
        check_text_length(length, model_config)
