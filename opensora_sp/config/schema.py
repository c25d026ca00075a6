"""What a config may say. Unknown keys are errors; every value is checked before a process or a model exists."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from opensora_sp.components import check_methods, component_class
from opensora_sp.data.buckets import Buckets
from opensora_sp.diffusion import IDDPM, RectifiedFlow, check_mask_ratios
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS, LatentEncoder, TextEncoder
from opensora_sp.models.registry import model_class, resolve_config
from opensora_sp.parallel import Options
from opensora_sp.resolutions import named_frames, named_size
from opensora_sp.weights import check_conversions

SCHEDULERS: dict[str, Any] = {"rflow": RectifiedFlow, "iddpm": IDDPM}
Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Frames = Annotated[int, BeforeValidator(named_frames)]
"""A number of frames, or a name of one ("2s", "4x")."""


class Strict(BaseModel):
    """Refuses keys that it does not know."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Dataset(Strict):
    """Clips to train on: a CSV, JSONL or Parquet manifest with the columns path,text; see ``data.VideoTextDataset``.

    "VideoText" cuts all clips to one shape, "VariableVideoText" to those of ``bucket_config``, for which the manifest
    has num_frames, height and width. "CachedFeatures" takes either from the folder ``path`` that scripts/precompute.py
    made, and encodes nothing; ``manifest``, if set, has to be the one it was made of. A run stops when over
    ``max_bad_fraction`` of the clips it read are broken.
    """

    type: Literal["VideoText", "VariableVideoText", "CachedFeatures"] = "VideoText"
    manifest: str | None = None
    path: str | None = None
    frame_interval: int = Field(1, ge=1)
    transform: Literal["resize_center_crop", "resize_random_crop"] = "resize_center_crop"
    clip_start: Literal["middle", "random"] = "middle"
    time_limit: float = Field(60.0, gt=0)
    cache: bool = False
    max_bad_fraction: float = Field(0.2, ge=0, le=1)

    @model_validator(mode="after")
    def _has_its_source(self) -> Dataset:
        wanted, other = ("path", "manifest") if self.type == "CachedFeatures" else ("manifest", "path")
        if getattr(self, wanted) is None or (other == "path" and self.path is not None):
            raise ValueError(
                f"got dataset.type {self.type!r} with manifest {self.manifest!r} and path {self.path!r}; expected a "
                f"{wanted}; set dataset.{wanted}, and path for 'CachedFeatures' alone"
            )
        if self.type == "CachedFeatures" and self.cache:
            raise ValueError("got dataset.cache with 'CachedFeatures'; expected one of them; remove dataset.cache")
        return self


class Optimizer(Strict):
    """``HybridAdam`` is ColossalAI's fused Adam, for CUDA."""

    type: Literal["AdamW", "HybridAdam"] = "AdamW"
    lr: float = Field(1e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)


class SequenceParallel(Strict):
    """How ``sp_size`` ranks share a batch: the keyword arguments of ``opensora_sp.parallel.parallelize``."""

    strategy: Literal["switch", "ulysses", "split_gather"] = "switch"
    placement: Literal["stream", "branch"] = "stream"
    comm_dtype: Literal["bf16", "fp8"] | None = None
    overlap_chunks: int = Field(1, ge=1)
    overlap_backward: bool = False
    recompute_communication: bool = False
    verify: bool = False

    @model_validator(mode="after")
    def _options_fit(self) -> SequenceParallel:
        Options(**self.model_dump(exclude={"verify"}))
        return self


class Common(Strict):
    """What training and sampling share.

    The frame size is ``image_size``, or ``resolution`` ("HxW", one number, or a name such as "240p" with its
    ``aspect_ratio``, "9:16"); ``num_frames`` a number or a name such as "2s". Names are those of Open-Sora 1.2.
    ``allow_pickle`` and ``convert`` are about the weights to begin with (``load``, ``ckpt``); see ``weights``.
    ``compile="blocks"`` lets ``torch.compile`` compile the blocks of the model.
    """

    num_frames: Frames
    resolution: str | int | None = None
    aspect_ratio: str | None = None
    image_size: tuple[int, int] | None = None
    sp_size: int = Field(1, ge=1)
    sequence_parallel: SequenceParallel = SequenceParallel()
    seed: int = Field(42, ge=0)
    model: dict[str, Any]
    compile: Literal["blocks"] | None = None
    vae: dict[str, Any]
    text_encoder: dict[str, Any]
    scheduler: dict[str, Any] = Field(default_factory=lambda: {"type": "rflow"})
    allow_pickle: bool = False
    convert: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_frame_size(self) -> Common:
        if (self.resolution is None) == (self.image_size is None):
            raise ValueError(
                f"got resolution {self.resolution!r} and image_size {self.image_size!r}; expected exactly one of them; "
                "set resolution='512x512' or image_size=(512, 512)"
            )
        if self.resolution is None and self.aspect_ratio is not None:
            raise ValueError(
                f"got aspect_ratio {self.aspect_ratio!r} with image_size {self.image_size}; expected it with a named "
                "resolution; write resolution='240p' instead of image_size, or leave it away"
            )
        if self.resolution is not None:
            self.image_size = frame_size(self.resolution, self.aspect_ratio)
            self.resolution = self.aspect_ratio = None
        assert self.image_size is not None
        if min(self.image_size) < 1:
            raise ValueError(f"got a frame size of {self.image_size}; expected positive numbers; change it")
        return self

    @field_validator("vae")
    @classmethod
    def _vae(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_component("vae", value, LATENT_ENCODERS, LatentEncoder)

    @field_validator("text_encoder")
    @classmethod
    def _text_encoder(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_component("text_encoder", value, TEXT_ENCODERS, TextEncoder)

    @field_validator("convert")
    @classmethod
    def _convert(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_conversions(value)

    @field_validator("scheduler")
    @classmethod
    def _scheduler(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_component("scheduler", {"type": "rflow", **value}, SCHEDULERS)

    @field_validator("model")
    @classmethod
    def _model(cls, value: dict[str, Any]) -> dict[str, Any]:
        name, options = split_type("model", value)
        options = check_values("model", options, model_class(name).Config)
        resolve_config(name, **options)
        return {"type": name, **options}

    @model_validator(mode="after")
    def _scheduler_fits_model(self) -> Common:
        name, options = split_type("model", self.model)
        model = resolve_config(name, **options)
        build_component(self.scheduler, SCHEDULERS).check_channels(model.in_channels, model.out_channels)
        return self

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        assert self.image_size is not None
        return self.image_size


class PromptOptions(Strict):
    """A prompt, and what it says for itself; the rest is as in the config. The columns of a prompt file."""

    prompt: str
    negative_prompt: str | None = None
    num_frames: Frames | None = None
    resolution: str | None = None
    aspect_ratio: str | None = None
    height: int | None = Field(None, ge=1)
    width: int | None = Field(None, ge=1)
    fps: float | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=0)
    reference_path: str | None = None
    mask_strategy: str | None = None

    @model_validator(mode="after")
    def _one_size(self) -> PromptOptions:
        pixels = (self.height is None, self.width is None)
        if pixels[0] != pixels[1] or (self.resolution is not None and not all(pixels)):
            raise ValueError(
                f"got height {self.height}, width {self.width} and resolution {self.resolution!r} for {self.prompt!r}; "
                "expected height and width, or resolution, or none of them; give one size"
            )
        if self.aspect_ratio is not None and self.resolution is None:
            raise ValueError(
                f"got aspect_ratio {self.aspect_ratio!r} without resolution for {self.prompt!r}; expected both; add "
                "for example resolution 240p"
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
    return [{"prompt": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value


Prompts = Annotated[list[PromptOptions], BeforeValidator(_prompts)]
"""Texts, or dicts of ``PromptOptions``."""


class Validation(Strict):
    """What is looked at ``every`` so many steps of training: videos of ``prompts``, and the loss of the clips of
    ``manifest`` in ``bins`` of timesteps. Left out are what the training config says and the scheduler's defaults."""

    every: int = Field(ge=1)
    prompts: Prompts = Field(default_factory=list)
    negative_prompt: str | None = None
    num_samples: int = Field(1, ge=1)
    num_sampling_steps: int | None = Field(None, ge=1)
    cfg_scale: float | None = None
    fps: float = Field(24.0, gt=0)
    format: Literal["mp4", "gif"] = "mp4"
    manifest: str | None = None
    bins: int = Field(10, ge=1)
    batch_size: int = Field(1, ge=1)
    use_ema: bool = True

    @model_validator(mode="after")
    def _looks_at_something(self) -> Validation:
        if not self.prompts and self.manifest is None:
            raise ValueError(
                "got validation without prompts and manifest; expected at least one of them; add prompts=['...'], or "
                "remove validation"
            )
        return self


class TrainConfig(Common):
    """A training run.

    ``batch_size`` counts clips of a micro-batch; an optimizer step consumes ``micro_batches_per_step`` of them over all
    replicas (by default one each), whatever the number of processes is. ``mask_ratios`` says how often which frames of
    a clip are given to the model, for example ``dict(image_head=0.1)``; see ``diffusion/frame_masks.py``.
    ``validation`` is off where it is None. ``wandb`` reports to Weights & Biases as well; ``peak_tflops`` is what one
    device can do at best, for the MFU, where it is not known.

    ``peer_timeout``, ``collective_timeout`` and ``grace_time`` (seconds) say when a run that cannot go on ends (see
    ``watch``), ``stopped_exit_code`` what it returns after SIGTERM; steps without a finite loss and gradient are left
    out, and ``max_bad_steps`` of them in a row end the run; ``check_sync_every`` so many steps, parameters and batches
    are compared between the ranks (0: never).

    ``bucket_config`` (see ``data/buckets.py``) is for mixed resolutions and lengths; ``num_frames``, ``image_size`` and
    ``batch_size`` are then those of its largest clips, at 16:9, for whoever asks for one size.
    """

    precision: Precision = "bf16"
    zero_stage: Literal[1, 2] = 2
    dataset: Dataset
    bucket_config: dict[str, dict[int, Any]] | None = None
    batch_size: int = Field(1, ge=1)
    micro_batches_per_step: int | None = Field(None, ge=1)
    num_workers: int = Field(0, ge=0)
    max_steps: int = Field(ge=1)
    warmup_steps: int = Field(0, ge=0)
    lr_schedule: Literal["constant", "cosine"] = "constant"
    optimizer: Optimizer = Optimizer()
    grad_clip: float = Field(0.0, ge=0)
    grad_checkpoint: bool = False
    ema_decay: float = Field(0.999, ge=0, lt=1)
    log_every: int = Field(1, ge=1)
    ckpt_every: int = Field(1000, ge=1)
    keep_last: int | None = Field(None, ge=1)
    keep_every: int | None = Field(None, ge=1)
    async_save: bool = False
    outputs: str = "outputs"
    load: str | None = None
    mask_ratios: dict[str, float] | None = None
    validation: Validation | None = None
    max_bad_steps: int = Field(10, ge=1)
    check_sync_every: int = Field(0, ge=0)
    peer_timeout: float = Field(60.0, ge=5)
    collective_timeout: float = Field(1800.0, gt=0)
    grace_time: float = Field(300.0, gt=0)
    stopped_exit_code: Literal[0, 143] = 0
    wandb: bool = False
    peak_tflops: float | None = Field(None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _one_size_of_buckets(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("bucket_config") is None:
            return values
        largest = Buckets.of(values["bucket_config"]).largest
        _, *size = largest.shape_at(9 / 16)
        sizes = {"num_frames": largest.num_frames, "image_size": tuple(size), "batch_size": largest.batch_size}
        for key in (*sizes, "resolution", "aspect_ratio"):
            given = values.get(key)
            if given is not None and (tuple(given) if isinstance(given, list) else given) != sizes.get(key):
                raise ValueError(
                    f"got {key} {given!r} beside bucket_config; expected sizes in one place; remove {key}, or set "
                    "bucket_config to None"
                )
        return {**values, **sizes}

    @model_validator(mode="after")
    def _buckets_fit(self) -> TrainConfig:
        fitting = "VideoText" if self.bucket_config is None else "VariableVideoText"
        if self.dataset.type not in (fitting, "CachedFeatures"):
            found = "without" if self.bucket_config is None else "with"
            raise ValueError(
                f"got dataset.type {self.dataset.type!r} {found} bucket_config; "
                "expected 'VariableVideoText' with buckets, 'VideoText' without; change one of them"
            )
        name, options = split_type("model", self.model)
        if self.bucket_config is not None and hasattr(resolve_config(name, **options), "input_size"):
            raise ValueError(
                f"got bucket_config for the model {name!r}, whose positions are made for one input_size; expected a "
                "model for any size; take STDiT2 or STDiT3"
            )
        return self

    @field_validator("mask_ratios")
    @classmethod
    def _mask_ratios(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None:
            check_mask_ratios(value)
        return value

    @model_validator(mode="after")
    def _training_precision(self) -> TrainConfig:
        if self.precision == "fp64":
            raise ValueError("got precision 'fp64'; expected 'fp32', 'bf16' or 'fp16' for training; choose one")
        return self


class InferenceConfig(Common):
    """A sampling run. Where ``sp_size`` is None, it is chosen by an estimate of the time.

    ``prompts`` are texts, or dicts of ``PromptOptions``; ``num_samples`` videos are made of each, from different noise.
    ``skip_existing`` leaves out videos that are there already, of the same request. Videos are written as ``format``,
    single frames as PNG.

    ``reference_path`` and ``mask_strategy`` say what is given of the videos, where a prompt does not say it itself. A
    ``loop`` after the first goes on from the last ``condition_frame_length`` latent frames of the one before, which
    are generated anew in the last ``condition_frame_edit`` of the schedule.
    """

    sp_size: int | None = Field(None, ge=1)  # type: ignore[assignment]
    precision: Precision = "bf16"
    fps: float = Field(24.0, gt=0)
    batch_size: int = Field(1, ge=1)
    ckpt: str | None = None
    use_ema: bool = True
    prompts: Prompts = Field(default_factory=list)
    num_samples: int = Field(1, ge=1)
    skip_existing: bool = False
    format: Literal["mp4", "gif"] = "mp4"
    negative_prompt: str | None = None
    reference_path: str | None = None
    mask_strategy: str | None = None
    loop: int = Field(1, ge=1)
    condition_frame_length: int = Field(5, ge=1)
    condition_frame_edit: float = Field(0.0, ge=0, le=1)
    outputs: str = "samples"


def frame_size(resolution: str | int, aspect_ratio: str | None) -> tuple[int, int]:
    """Height and width in pixels of "HxW", of one number (a square), or of a named resolution and aspect ratio."""
    if aspect_ratio is not None:
        return named_size(str(resolution), aspect_ratio)
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", str(resolution))
    if match is None:
        raise ValueError(
            f"got resolution {resolution!r}; expected 'HxW' or a number, or a name and an aspect_ratio; write '512x512'"
            " or for example resolution='240p', aspect_ratio='9:16'"
        )
    return int(match[1]), int(match[2] or match[1])


def split_type(key: str, value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """``dict(type=name, **options)`` -> (name, options)."""
    if not isinstance(value.get("type"), str):
        raise ValueError(f"got {key} without the name of a type; expected {key}=dict(type='...', ...); add type")
    return value["type"], {k: v for k, v in value.items() if k != "type"}


def check_component(
    key: str, value: dict[str, Any], known: dict[str, Any], protocol: type | None = None
) -> dict[str, Any]:
    """Check ``type``, a known class or an importable one, and the options against the constructor's arguments."""
    name, options = split_type(key, value)
    cls = component_class(key, name, known)
    check_options(key, name, options, cls)
    options = check_values(key, options, cls)
    if protocol is not None:
        check_methods(key, cls, protocol)
    elif dataclasses.is_dataclass(cls):
        build_component({"type": name, **options}, known)  # checks itself
    return {"type": name, **options}


def check_options(key: str, name: str, options: dict[str, Any], cls: Any) -> None:
    """Raise ValueError unless the class takes these options, and needs no others."""
    parameters = inspect.signature(cls).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in named]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    for option in options:
        if option not in names and not takes_any:
            close = difflib.get_close_matches(option, names, n=1, cutoff=0.5)
            advice = f"did you mean {close[0]!r}?" if close else "remove it"
            raise ValueError(f"got the unknown key '{key}.{option}'; expected one of {names}; {advice}")
    for parameter in named:
        if parameter.default is inspect.Parameter.empty and parameter.name not in options:
            option = parameter.name
            raise ValueError(f"got {key} of type {name!r} without {option!r}; expected a value; set {key}.{option}")


def check_values(key: str, options: dict[str, Any], cls: type) -> dict[str, Any]:
    """The options converted to the types that the class annotates its arguments with."""
    try:
        hints = get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)  # type: ignore[misc]
    except NameError:  # a class of the user's, annotated with names that only a type checker imports
        hints = {}
    checked = dict(options)
    for option, value in options.items():
        try:
            checked[option] = TypeAdapter(hints[option]).validate_python(value) if option in hints else value
        except ValidationError as error:
            raise ValueError(
                f"got {key}.{option} = {value!r}; {error.errors()[0]['msg']}; change {key}.{option}"
            ) from None
    return checked


def build_component(value: dict[str, Any], known: dict[str, Any]) -> Any:
    """Build what ``dict(type=..., **options)`` describes."""
    name, options = split_type("component", value)
    return component_class("component", name, known)(**options)
