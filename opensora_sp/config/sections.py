"""The parts of a config that are objects of their own: data, optimizer, sequence parallelism,
prompts, validation.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

from opensora_sp.parallel import Options
from opensora_sp.resolutions import named_frames, named_size

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Frames = Annotated[int, BeforeValidator(named_frames)]
"""A number of frames, or a name of one ("2s", "4x")."""


class Strict(BaseModel):
    """Refuses keys that it does not know."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Dataset(Strict):
    """Clips to train on: a CSV, JSONL or Parquet manifest with the columns path,text; see
    ``data.VideoTextDataset``.

    "VideoText" cuts all clips to one shape, "VariableVideoText" to those of ``bucket_config``, for
    which the manifest has num_frames, height and width.
    """

    type: Literal["VideoText", "VariableVideoText", "CachedFeatures"] = Field(
        "VideoText",
        description="Clips of one shape, of those of `bucket_config`, or either from a feature "
        "cache.",
    )
    manifest: str | None = Field(
        None,
        description="CSV, JSONL or Parquet file with the columns path,text; with a cache, the one "
        "it is made of.",
    )
    path: str | None = Field(
        None, description="The folder that scripts/precompute.py made, for CachedFeatures."
    )
    frame_interval: int = Field(1, ge=1, description="Take every n-th frame of a file.")
    transform: Literal["resize_center_crop", "resize_random_crop"] = Field(
        "resize_center_crop",
        description="How frames are brought to size: resized to cover it, then cut.",
    )
    clip_start: Literal["middle", "random"] = Field(
        "middle", description="Where in a file its frames are taken."
    )
    time_limit: float = Field(
        60.0, gt=0, description="Seconds after which a file counts as broken."
    )
    cache: bool = Field(
        False, description="Keep decoded clips in memory; for small sets, with nothing random."
    )
    max_bad_fraction: float = Field(
        0.2,
        ge=0,
        le=1,
        description="A run stops when more than this share of the clips it read are broken.",
    )

    @model_validator(mode="after")
    def _has_its_source(self) -> Dataset:
        wanted, other = (
            ("path", "manifest") if self.type == "CachedFeatures" else ("manifest", "path")
        )
        if getattr(self, wanted) is None or (other == "path" and self.path is not None):
            raise ValueError(
                f"got dataset.type {self.type!r} with manifest {self.manifest!r} and path "
                f"{self.path!r}; expected a {wanted}; set dataset.{wanted}, and path for "
                "'CachedFeatures' alone"
            )
        if self.type == "CachedFeatures" and self.cache:
            raise ValueError(
                "got dataset.cache with 'CachedFeatures'; expected one of them; remove "
                "dataset.cache"
            )
        return self


class Optimizer(Strict):
    """The optimizer; ``HybridAdam`` is ColossalAI's fused Adam, for CUDA."""

    type: Literal["AdamW", "HybridAdam"] = Field(
        "AdamW", description="torch's AdamW, or ColossalAI's fused Adam (CUDA only)."
    )
    lr: float = Field(1e-4, gt=0, description="Learning rate after warm-up.")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="Decay of the means of gradients and their squares."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of the mean square.")
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay, in units of the learning rate."
    )


def _option_fields() -> dict[str, Any]:
    """The fields of ``Options`` as pydantic reads them: types, defaults and help texts."""
    types, found = get_type_hints(Options), {}
    for one in dataclasses.fields(Options):
        if one.metadata["in_config"]:
            choices = one.metadata["choices"]
            annotation = Literal[choices] if choices else types[one.name]
            found[one.name] = (annotation, Field(one.default, description=one.metadata["help"]))
    return found


_OptionFields: Any = create_model("_OptionFields", __base__=Strict, **_option_fields())


class SequenceParallel(_OptionFields):
    """How ``sp_size`` ranks share a batch: the fields of ``opensora_sp.parallel.Options``."""

    @model_validator(mode="after")
    def _options_fit(self) -> SequenceParallel:
        Options(**self.model_dump())
        return self

    if TYPE_CHECKING:
        # mypy does not see fields that are made at run time.
        def __getattr__(self, name: str) -> Any: ...


class PromptOptions(Strict):
    """A prompt, and what it says for itself; the rest is as in the config. The columns of a prompt
    file.
    """

    prompt: str = Field(
        description="The text; `|0| ... |2| ...` changes it from a loop on, `{...}` gives "
        "references."
    )
    negative_prompt: str | None = Field(
        None, description="What guidance moves away from, instead of no caption."
    )
    num_frames: Frames | None = Field(None, description="Frames, or a name such as 2s.")
    resolution: str | None = Field(
        None, description="HEIGHTxWIDTH in pixels, or a name such as 240p."
    )
    aspect_ratio: str | None = Field(
        None, description="HEIGHT:WIDTH such as 9:16, with a named resolution."
    )
    height: int | None = Field(None, ge=1, description="Pixels.")
    width: int | None = Field(None, ge=1, description="Pixels.")
    fps: float | None = Field(None, gt=0, description="Frames per second.")
    seed: int | None = Field(
        None, ge=0, description="Of its noise; then the same wherever the prompt stands."
    )
    reference_path: str | None = Field(
        None, description="Images and videos that are given, separated by `;`."
    )
    mask_strategy: str | None = Field(
        None, description="Where their frames go; see docs/sampling.md."
    )

    @model_validator(mode="after")
    def _one_size(self) -> PromptOptions:
        pixels = (self.height is None, self.width is None)
        if pixels[0] != pixels[1] or (self.resolution is not None and not all(pixels)):
            raise ValueError(
                f"got height {self.height}, width {self.width} and resolution {self.resolution!r} "
                f"for {self.prompt!r}; expected height and width, or resolution, or none of them; "
                "give one size"
            )
        if self.aspect_ratio is not None and self.resolution is None:
            raise ValueError(
                f"got aspect_ratio {self.aspect_ratio!r} without resolution for {self.prompt!r}; "
                "expected both; add for example resolution 240p"
            )
        if self.resolution is not None:
            frame_size(self.resolution, self.aspect_ratio)  # known names
        return self

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width in pixels, None if the prompt says nothing of them."""
        if self.height is not None and self.width is not None:
            return self.height, self.width
        return None if self.resolution is None else frame_size(self.resolution, self.aspect_ratio)


def _prompts(value: Any) -> Any:
    return (
        [{"prompt": one} if isinstance(one, str) else one for one in value]
        if isinstance(value, list)
        else value
    )


Prompts = Annotated[list[PromptOptions], BeforeValidator(_prompts)]
"""Texts, or dicts of ``PromptOptions``."""


class Validation(Strict):
    """What is looked at ``every`` so many steps of training: videos of ``prompts``, and the loss of
    the clips of ``manifest`` in ``bins`` of timesteps. Left out are what the training config says
    and the scheduler's defaults.
    """

    every: int = Field(ge=1, description="Optimizer steps from one look to the next.")
    prompts: Prompts = Field(
        default_factory=list, description="Texts to sample, or dicts of a prompt's options."
    )
    negative_prompt: str | None = Field(
        None, description="What guidance moves away from, instead of no caption."
    )
    num_samples: int = Field(1, ge=1, description="Videos of each prompt.")
    num_sampling_steps: int | None = Field(None, ge=1, description="Steps from noise to video.")
    cfg_scale: float | None = Field(None, description="Guidance; 1 turns it off.")
    fps: float = Field(24.0, gt=0, description="Frames per second of the videos.")
    format: Literal["mp4", "gif"] = Field("mp4", description="Kind of file.")
    manifest: str | None = Field(None, description="Clips whose loss is measured.")
    bins: int = Field(10, ge=1, description="Parts of the timesteps with a loss each.")
    batch_size: int = Field(1, ge=1, description="Clips or videos at a time.")
    use_ema: bool = Field(True, description="Look at the averaged weights.")

    @model_validator(mode="after")
    def _looks_at_something(self) -> Validation:
        if not self.prompts and self.manifest is None:
            raise ValueError(
                "got validation without prompts and manifest; expected at least one of them; add "
                "prompts=['...'], or remove validation"
            )
        return self


def frame_size(resolution: str | int, aspect_ratio: str | None) -> tuple[int, int]:
    """Height and width in pixels of "HxW", of one number (a square), or of a named resolution and
    aspect ratio.
    """
    if aspect_ratio is not None:
        return named_size(str(resolution), aspect_ratio)
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", str(resolution))
    if match is None:
        raise ValueError(
            f"got resolution {resolution!r}; expected 'HxW' or a number, or a name and an "
            "aspect_ratio; write '512x512' or for example resolution='240p', aspect_ratio='9:16'"
        )
    return int(match[1]), int(match[2] or match[1])
