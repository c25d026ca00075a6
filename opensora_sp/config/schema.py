"""What a config may say. Unknown keys are errors; every value is checked before a process or a model exists."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from opensora_sp.diffusion import IDDPM, RectifiedFlow, check_mask_ratios
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS
from opensora_sp.models.registry import model_class, resolve_config
from opensora_sp.parallel import Options

SCHEDULERS: dict[str, Any] = {"rflow": RectifiedFlow, "iddpm": IDDPM}
Precision = Literal["fp32", "bf16", "fp16", "fp64"]


class Strict(BaseModel):
    """Refuses keys that it does not know."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Dataset(Strict):
    """Clips to train on: a CSV manifest with the columns path,text."""

    type: Literal["VideoText"] = "VideoText"
    manifest: str
    frame_interval: int = Field(1, ge=1)
    cache: bool = False


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
    """What training and sampling share. The frame size is ``resolution`` ("HxW" or one number) or ``image_size``."""

    num_frames: int = Field(ge=1)
    resolution: str | int | None = None
    image_size: tuple[int, int] | None = None
    sp_size: int = Field(1, ge=1)
    sequence_parallel: SequenceParallel = SequenceParallel()
    seed: int = Field(42, ge=0)
    model: dict[str, Any]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]
    scheduler: dict[str, Any] = Field(default_factory=lambda: {"type": "rflow"})

    @model_validator(mode="after")
    def _one_frame_size(self) -> Common:
        if (self.resolution is None) == (self.image_size is None):
            raise ValueError(
                f"got resolution {self.resolution!r} and image_size {self.image_size!r}; expected exactly one of them; "
                "set resolution='512x512' or image_size=(512, 512)"
            )
        if self.image_size is None:
            match = re.fullmatch(r"(\d+)(?:x(\d+))?", str(self.resolution))
            if match is None:
                raise ValueError(f"got resolution {self.resolution!r}; expected 'HxW' or a number; write '512x512'")
            self.image_size = (int(match[1]), int(match[2] or match[1]))
            self.resolution = None
        if min(self.image_size) < 1:
            raise ValueError(f"got a frame size of {self.image_size}; expected positive numbers; change it")
        return self

    @field_validator("vae")
    @classmethod
    def _vae(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_component("vae", value, LATENT_ENCODERS)

    @field_validator("text_encoder")
    @classmethod
    def _text_encoder(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_component("text_encoder", value, TEXT_ENCODERS)

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


class TrainConfig(Common):
    """A training run.

    ``batch_size`` counts clips of a micro-batch; an optimizer step consumes ``micro_batches_per_step`` of them over all
    replicas (by default one each), whatever the number of processes is. ``mask_ratios`` says how often which frames of
    a clip are given to the model, for example ``dict(image_head=0.1)``; see ``diffusion/frame_masks.py``.
    """

    precision: Precision = "bf16"
    zero_stage: Literal[1, 2] = 2
    dataset: Dataset
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
    """A sampling run. ``sp_size`` None lets all processes work on the same prompts.

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
    prompts: list[str] = Field(default_factory=list)
    negative_prompt: str | None = None
    reference_path: str | None = None
    mask_strategy: str | None = None
    loop: int = Field(1, ge=1)
    condition_frame_length: int = Field(5, ge=1)
    condition_frame_edit: float = Field(0.0, ge=0, le=1)
    outputs: str = "samples"


def split_type(key: str, value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """``dict(type=name, **options)`` -> (name, options)."""
    if not isinstance(value.get("type"), str):
        raise ValueError(f"got {key} without the name of a type; expected {key}=dict(type='...', ...); add type")
    return value["type"], {k: v for k, v in value.items() if k != "type"}


def check_component(key: str, value: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Check ``type`` against the known classes and the options against the constructor's arguments."""
    name, options = split_type(key, value)
    if name not in known:
        raise ValueError(f"got {key}.type {name!r}; expected one of {sorted(known)}; choose one of these")
    parameters = dict(inspect.signature(known[name]).parameters)
    for option in options:
        if option not in parameters:
            close = difflib.get_close_matches(option, parameters, n=1, cutoff=0.5)
            advice = f"did you mean {close[0]!r}?" if close else "remove it"
            raise ValueError(f"got the unknown key '{key}.{option}'; expected one of {list(parameters)}; {advice}")
    for option, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"got {key} of type {name!r} without {option!r}; expected a value; set {key}.{option}")
    options = check_values(key, options, known[name])
    if dataclasses.is_dataclass(known[name]):
        known[name](**options)  # checks itself
    return {"type": name, **options}


def check_values(key: str, options: dict[str, Any], cls: type) -> dict[str, Any]:
    """The options converted to the types that the class annotates its arguments with."""
    hints = get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__)  # type: ignore[misc]
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
    return known[name](**options)
