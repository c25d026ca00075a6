"""Sections of a config: data set, sequence parallelism, prompts, validation."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from opensora_sp.data.resolutions import named_frames, named_size
from opensora_sp.diffusion.process import GuidanceScale, NumSteps
from opensora_sp.models.lora import DEFAULT_TARGETS
from opensora_sp.parallel.options import Options

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Frames = Annotated[int, BeforeValidator(named_frames)]
"""A number of frames, or its name ("2s", "4x")."""

Fps = Annotated[float, Field(gt=0, le=1000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Strict(BaseModel):
    """Base of all sections; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )


class Dataset(Strict):
    """Training clips: a CSV, JSONL or Parquet manifest with the columns path,text.

    "VideoText" crops all clips to one shape. "VariableVideoText" crops them to the shapes of
    ``bucket_config`` and needs the columns num_frames, height and width; see
    ``data.VideoTextDataset``.
    """

    type: Literal["VideoText", "VariableVideoText", "CachedFeatures"] = "VideoText"
    """Clips of one shape, of the shapes of `bucket_config`, or from a feature cache."""

    manifest: str | None = None
    """CSV, JSONL or Parquet file with the columns path,text; not for CachedFeatures."""

    path: str | None = None
    """Folder written by opensora-sp precompute, for CachedFeatures."""

    frame_interval: int = Field(1, ge=1)
    """Every n-th frame of a file is used."""

    transform: Literal["resize_center_crop", "resize_random_crop"] = "resize_center_crop"
    """Resize frames to cover the image size, then crop at the centre or at random."""

    clip_start: Literal["middle", "random"] = "middle"
    """Position of the clip's frames in a file."""

    time_limit: float = Field(60.0, gt=0)
    """Seconds after which a file that is still being decoded counts as corrupt."""

    cache: bool = False
    """Keep decoded clips in memory; only for small data sets without random crops or starts."""

    max_bad_fraction: float = Field(0.2, ge=0, le=1)
    """Share of corrupt samples among those read that ends the run."""

    remove_caption_prefix: bool = False
    """Remove beginnings of captions such as `The video shows`; with CachedFeatures, of captions of
    held-out clips."""

    @model_validator(mode="after")
    def _has_its_source(self) -> Dataset:
        is_cached = self.type == "CachedFeatures"
        wanted = "path" if is_cached else "manifest"
        if getattr(self, wanted) is None or (not is_cached and self.path is not None):
            raise ValueError(
                f"got dataset.type {self.type!r} with manifest {self.manifest!r} and path "
                f"{self.path!r}; expected a {wanted}; set dataset.{wanted}, and path for "
                "'CachedFeatures' alone"
            )

        if is_cached and self.cache:
            raise ValueError(
                "got dataset.cache with 'CachedFeatures'; expected one of them; remove "
                "dataset.cache"
            )
        return self


def _option_fields() -> dict[str, Any]:
    """The fields of ``Options`` as pydantic reads them: types, defaults and help texts."""
    types, fields = get_type_hints(Options), {}
    for option in dataclasses.fields(Options):
        if option.metadata["in_config"]:
            text = option.metadata["help"]
            fields[option.name] = (types[option.name], Field(option.default, description=text))
    return fields


_OptionFields: Any = create_model("_OptionFields", __base__=Strict, **_option_fields())


class SequenceParallel(_OptionFields):
    """Options of ranks that share a batch: the fields of ``opensora_sp.parallel.Options``."""

    @model_validator(mode="after")
    def _options_fit(self) -> SequenceParallel:
        Options(**self.model_dump())
        return self

    if TYPE_CHECKING:
        # mypy does not see fields that are made at run time.
        def __getattr__(self, name: str) -> Any: ...


class Lora(Strict):
    """Low-rank adapters (LoRA), which are trained instead of the weights of ``load``."""

    rank: int = Field(16, ge=1)
    """Rank of an adapter's two matrices."""

    alpha: float = Field(16.0, gt=0)
    """Scale of the adapters, times `rank`: they are multiplied by alpha / rank."""

    targets: tuple[str, ...] = Field(DEFAULT_TARGETS, min_length=1)
    """Names of linear layers, or patterns of them such as `*.attn.qkv`; the last that matches
    decides, `!pattern` makes exceptions. By default all layers of all blocks."""

    dropout: float = Field(0.0, ge=0, lt=1)
    """Rate at which input features of the adapters are dropped, the same for all tokens of a
    micro-batch."""

    use_rslora: bool = False
    """Rank-stabilised scaling: alpha / sqrt(rank) instead of alpha / rank."""

    use_dora: bool = False
    """Train the norms of the adapted weights' rows as well (DoRA)."""

    load: str | None = None
    """Adapters to train further: a run, a checkpoint, a folder of peft, or a name on the hub; None
    begins with new ones. Their rank, alpha, layers and kind are those of this section."""

    quantize: Literal["int8"] | None = None
    """Keep the weights of the blocks' linear layers in int8, by torchao, while adapters are
    trained; None keeps the precision of the training."""

    @property
    def layer_options(self) -> dict[str, Any]:
        """The arguments of ``add_lora``."""
        return self.model_dump(exclude={"load", "quantize"})


def _named_files(cell: Any) -> Any:
    """``"actions=a.npy;map=b.npy"``, a cell of a prompt file, as a dict."""
    if not isinstance(cell, str):
        return cell
    pairs = [pair.partition("=") for pair in cell.split(";")]
    return {name.strip(): path.strip() for name, _, path in pairs}


class PromptOptions(Strict):
    """A prompt and its own options, the columns of a prompt file; None takes the config's value."""

    prompt: str
    """Text; `|0| ... |2| ...` changes it from a loop on, and `{...}` has references."""

    negative_prompt: str | None = None
    """Negative prompt of classifier-free guidance; None is the config's."""

    num_frames: Frames | None = None
    """Frames, or a name such as 2s; None is the config's."""

    resolution: str | None = None
    """HEIGHTxWIDTH in pixels, or a name such as 240p; None is the config's."""

    aspect_ratio: str | None = None
    """HEIGHT:WIDTH such as 9:16, with a named resolution."""

    fps: Fps | None = None
    """Frames per second; None is the config's."""

    seed: Seed | None = None
    """Seed of its noise, independent of its position; None is the config's."""

    reference_path: str | None = None
    """Conditioning images and videos, separated by `;`; None is the config's."""

    mask_strategy: str | None = None
    """Placement of the conditioning frames; see docs/sampling.md."""

    inputs: Annotated[dict[str, str], BeforeValidator(_named_files)] = {}
    """Files of the further inputs of a derived model, by name, or `actions=a.npy;map=b.npy`."""

    @model_validator(mode="after")
    def _size_is_known(self) -> PromptOptions:
        if self.aspect_ratio is not None and self.resolution is None:
            raise ValueError(
                f"got aspect_ratio {self.aspect_ratio!r} without resolution for {self.prompt!r}; "
                "expected both; add for example resolution 240p"
            )

        if self.resolution is not None:
            frame_size(self.resolution, self.aspect_ratio)  # raises for unknown names
        return self

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width in pixels; None if the prompt has no size."""
        return None if self.resolution is None else frame_size(self.resolution, self.aspect_ratio)


def _prompts(prompts: Any) -> Any:
    if not isinstance(prompts, list):
        return prompts
    return [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]


Prompts = Annotated[list[PromptOptions], BeforeValidator(_prompts)]
"""Texts, or dicts of ``PromptOptions``."""


class Validation(Strict):
    """Validation ``every`` so many steps: videos of ``prompts``, and the loss of held-out clips.

    The loss of the clips of ``manifest`` is measured in ``bins`` of timesteps. Other sampling
    options come from the training config, or are the scheduler's defaults.
    """

    every: int = Field(ge=1)
    """Optimizer steps between validations."""

    prompts: Prompts = []
    """Prompts to sample: texts, or dicts of the options of one prompt."""

    negative_prompt: str | None = None
    """Negative prompt of classifier-free guidance; None is no caption."""

    num_samples: int = Field(1, ge=1)
    """Videos per prompt."""

    num_sampling_steps: NumSteps | None = None
    """Sampling steps; None is the scheduler's default."""

    cfg_scale: GuidanceScale | None = None
    """Scale of classifier-free guidance, 1 is off; None is the scheduler's default."""

    fps: Fps = 24.0
    """Frames per second of the videos."""

    format: Literal["mp4", "gif"] = "mp4"
    """File format of videos."""

    manifest: str | None = None
    """Held-out clips whose loss is measured; None measures none."""

    bins: int = Field(10, ge=1)
    """Timestep bins, each with its loss."""

    batch_size: int = Field(1, ge=1)
    """Clips or videos in a batch."""

    use_ema: bool = True
    """Validate the EMA weights; False validates the current ones."""

    @model_validator(mode="after")
    def _has_prompts_or_clips(self) -> Validation:
        if not self.prompts and self.manifest is None:
            raise ValueError(
                "got validation without prompts and manifest; expected at least one of them; add "
                "prompts=['...'], or remove validation"
            )
        return self


def frame_size(resolution: str | int, aspect_ratio: str | None) -> tuple[int, int]:
    """Height and width in pixels.

    Args:
        resolution: "HxW" or one number (a square); with an ``aspect_ratio``, a name.

    Raises:
        ValueError: for any other resolution, or an unknown name.
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
