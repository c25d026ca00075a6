"""The schema of training and sampling configs.

Unknown keys are errors. All values are checked before a process group or a model exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from opensora_sp.checkpoint import check_conversions
from opensora_sp.data.buckets import Buckets
from opensora_sp.diffusion import check_mask_ratios
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS, LatentEncoder, TextEncoder
from opensora_sp.models.registry import model_class

from .components import (
    SCHEDULERS,
    build_component,
    check_component,
    check_keys,
    check_values,
    split_type,
)
from .findings import raise_together
from .geometry import check_input_size, check_latents, check_text_length, latent_size
from .model_spec import ModelSpec
from .sections import (
    Dataset,
    Frames,
    Optimizer,
    Precision,
    PromptOptions,
    Prompts,
    SequenceParallel,
    Strict,
    Validation,
    frame_size,
)

__all__ = [
    "SCHEDULERS",
    "Common",
    "InferenceConfig",
    "PromptOptions",
    "TrainConfig",
    "Validation",
    "check_values",
]


class Common(Strict):
    """Keys of both training and sampling.

    The frame size is ``image_size``, or ``resolution`` ("HxW", one number, or a name such as "240p"
    with an ``aspect_ratio`` such as "9:16"). ``num_frames`` is a number or a name such as "2s".
    Names are those of Open-Sora 1.2. ``allow_pickle`` and ``convert`` concern the initial weights
    (``load``, ``ckpt``).
    """

    num_frames: Frames = Field(description="Frames of a clip; 1 for images, or a name such as 2s.")
    resolution: str | int | None = Field(
        None,
        description="HEIGHTxWIDTH in pixels, the side of a square, or a name such as 240p with "
        "`aspect_ratio`.",
    )
    aspect_ratio: str | None = Field(
        None, description="HEIGHT:WIDTH such as 9:16, with a named `resolution`."
    )
    image_size: tuple[int, int] | None = Field(
        None, description="(height, width) in pixels, instead of `resolution`."
    )
    sp_size: int = Field(
        1,
        ge=1,
        description="Ranks that share each batch; 1 is no sequence parallelism.",
    )
    sequence_parallel: SequenceParallel = Field(
        SequenceParallel(), description="Options of sequence parallelism."
    )
    seed: int = Field(42, ge=0, description="Seed of all random draws.")
    model: dict[str, Any] = Field(
        description="dict(type=..., ...): model class or preset, and its options."
    )
    compile: Literal["blocks"] | None = Field(
        None,
        description="'blocks' compiles each block with torch.compile; None is eager mode.",
    )
    vae: dict[str, Any] = Field(
        description="dict(type=..., ...): video autoencoder, and its options."
    )
    text_encoder: dict[str, Any] = Field(
        description="dict(type=..., ...): text encoder, and its options."
    )
    scheduler: dict[str, Any] = Field(
        default_factory=lambda: {"type": "rflow"},
        description="dict(type=..., ...): diffusion process, and its options.",
    )
    allow_pickle: bool = Field(
        False, description="Also read pickled weights, which can execute code."
    )
    convert: tuple[str, ...] = Field(
        (), description="Conversions of the initial weights, by name; see docs/weights.md."
    )

    @model_validator(mode="after")
    def _values_fit(self) -> Common:
        self._one_frame_size()
        self._one_latent_size()
        raise_together(*self._rules())
        return self

    def _one_frame_size(self) -> None:
        """Set ``image_size`` from ``resolution`` and ``aspect_ratio``, if the config has these."""
        if (self.resolution is None) == (self.image_size is None):
            raise ValueError(
                f"got resolution {self.resolution!r} and image_size {self.image_size!r}; expected "
                "exactly one of them; set resolution='512x512' or image_size=(512, 512)"
            )

        if self.resolution is None and self.aspect_ratio is not None:
            raise ValueError(
                f"got aspect_ratio {self.aspect_ratio!r} with image_size {self.image_size}; "
                "expected it with a named resolution; write resolution='240p' instead of "
                "image_size, or remove aspect_ratio"
            )

        if self.resolution is not None:
            self.image_size = frame_size(self.resolution, self.aspect_ratio)
            self.resolution = self.aspect_ratio = None

        assert self.image_size is not None
        if min(self.image_size) < 1:
            raise ValueError(
                f"got a frame size of {self.image_size}; expected positive numbers; change it"
            )

    def _one_latent_size(self) -> None:
        """Set the model's ``input_size`` from the clips, if it needs one that is not set."""
        if "input_size" in self.model or self.model_spec.input_size is None:
            return

        latents = latent_size(self.vae, self.num_frames, *self.size)
        if latents is not None and min(latents) > 0:
            sized = {**self.model, "input_size": latents}
            ModelSpec.parse(sized)  # raises if the model cannot take this size
            self.model = sized

    def _rules(self) -> Iterator[Callable[[], object]]:
        """Checks of several values together; each raises ValueError on its own."""
        yield self._scheduler_fits_model
        yield lambda: check_text_length(self.text_encoder, self.model_spec.config)
        for clip in self._clips():
            yield partial(check_latents, self.vae, *clip)

    def _clips(self) -> list[tuple[int, int, int]]:
        """Frames, height and width in pixels of all shapes of clips."""
        return [(self.num_frames, *self.size)]

    def _scheduler_fits_model(self) -> None:
        model = self.model_spec.config
        scheduler = build_component(self.scheduler, SCHEDULERS)
        scheduler.check_channels(model.in_channels, model.out_channels)

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
        config = model_class(name).Config
        check_keys("model", options, [field.name for field in dataclasses.fields(config)])
        checked = {"type": name, **check_values("model", options, config)}
        ModelSpec.parse(checked)
        return checked

    @property
    def model_spec(self) -> ModelSpec:
        """``model``, parsed."""
        return ModelSpec.parse(self.model)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        assert self.image_size is not None
        return self.image_size


class TrainConfig(Common):
    """A training run.

    An optimizer step consumes ``micro_batches_per_step`` micro-batches of ``batch_size`` clips over
    all replicas (by default one each), whatever the number of processes is. ``max_steps`` or
    ``epochs`` is the length of the run. The watchdog (``runtime``) ends a run that cannot continue.

    ``bucket_config`` (see ``data/buckets.py``) is for mixed resolutions and lengths. Then
    ``num_frames``, ``image_size`` and ``batch_size`` are those of its largest clips, at 16:9.
    """

    precision: Precision = Field(
        "bf16", description="Data type of the model's computation; fp64 is not for training."
    )
    zero_stage: Literal[1, 2] = Field(
        2, description="ZeRO stage: 1 shards optimizer states, 2 gradients as well."
    )
    overlap_communication: bool = Field(
        True,
        description="Reduce gradients on a separate CUDA stream during backward; on CPU it is "
        "done after backward.",
    )
    dataset: Dataset = Field(description="Training clips.")
    bucket_config: dict[str, dict[int, Any]] | None = Field(
        None,
        description="{resolution: {frames: (keep probability, batch size)}}; see docs/data.md. "
        "None: one shape for all clips.",
    )
    batch_size: int = Field(1, ge=1, description="Clips of a micro-batch.")
    micro_batches_per_step: int | None = Field(
        None,
        ge=1,
        description="Micro-batches of an optimizer step over all replicas; None is one for each "
        "replica.",
    )
    num_workers: int = Field(
        0, ge=0, description="Data loading processes per rank; 0 loads in the rank itself."
    )
    max_steps: int = Field(0, ge=0, description="Optimizer steps of the run; 0 if `epochs` is set.")
    epochs: int | None = Field(
        None,
        ge=1,
        description="Passes over the clips, instead of `max_steps`; each has as many steps as "
        "the first.",
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps of linear warm-up of the learning rate from 0."
    )
    lr_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="Learning rate after warm-up: constant, or cosine decay to 0."
    )
    optimizer: Optimizer = Field(Optimizer(), description="Optimizer and its options.")
    freeze: tuple[str, ...] = Field(
        (),
        description="Patterns of parameters that are not trained, such as `y_embedder.*`; "
        "`!pattern` makes exceptions.",
    )
    grad_clip: float = Field(
        0.0, ge=0, description="Largest global norm of the gradients; 0 is no clipping."
    )
    grad_checkpoint: bool = Field(
        False,
        description="Gradient checkpointing: recompute activations in backward to save memory.",
    )
    deterministic: bool = Field(
        False,
        description="Deterministic CUDA kernels: the same step gives the same bits, but is slower.",
    )
    ema_decay: float = Field(0.999, ge=0, lt=1, description="Decay of the EMA weights per step.")
    log_every: int = Field(1, ge=1, description="Steps between log lines.")
    ckpt_every: int = Field(
        1000, ge=1, description="Steps between checkpoints; the last step has one as well."
    )
    keep_last: int | None = Field(
        None, ge=1, description="Number of newest checkpoints to keep; None keeps all."
    )
    keep_every: int | None = Field(
        None,
        ge=1,
        description="Also keep checkpoints at multiples of this many steps; None keeps no others.",
    )
    async_save: bool = Field(
        False, description="Write checkpoints asynchronously, in the background."
    )
    outputs: str = Field("outputs", description="Folder of the run.")
    load: str | None = Field(
        None,
        description="Initial weights: a run, a checkpoint, a folder or a file; None initialises "
        "them randomly.",
    )
    mask_ratios: dict[str, float] | None = Field(
        None,
        description="Probability of each strategy of conditioning frames; see docs/data.md. "
        "None: no conditioning frames.",
    )
    validation: Validation | None = Field(
        None, description="Sampling and held-out loss during training; None is off."
    )
    wandb: bool = Field(False, description="Also log to Weights & Biases.")
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak throughput of one device in TFLOP/s, for the MFU; None looks the "
        "device up.",
    )
    max_bad_steps: int = Field(
        10,
        ge=1,
        description="Consecutive steps with a non-finite loss or gradient that end the run; "
        "each such step is skipped.",
    )
    check_sync_every: int = Field(
        0,
        ge=0,
        description="Steps between comparisons of weights and batches across ranks; 0 is off.",
    )
    peer_timeout: float = Field(
        60.0,
        ge=5,
        description="Seconds without a heartbeat of another rank after which a rank ends.",
    )
    collective_timeout: float = Field(
        1800.0,
        gt=0,
        description="Seconds after which a collective that some rank has not joined ends the "
        "run; process groups time out 60 s later.",
    )
    grace_time: float = Field(
        300.0,
        gt=0,
        description="Seconds for the last step and its checkpoint after SIGTERM.",
    )
    stopped_exit_code: Literal[0, 143] = Field(
        0, description="Exit code of a run stopped by SIGTERM."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_size_of_buckets(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("bucket_config") is None:
            return values

        largest = Buckets.of(values["bucket_config"]).largest
        _, *size = largest.shape_at(9 / 16)
        sizes = {
            "num_frames": largest.num_frames,
            "image_size": tuple(size),
            "batch_size": largest.batch_size,
        }

        conflicts = []
        for key in (*sizes, "resolution", "aspect_ratio"):
            value = values.get(key)
            value = tuple(value) if isinstance(value, list) else value
            if value is not None and value != sizes.get(key):
                conflicts.append(
                    f"got {key} {value!r} beside bucket_config; expected sizes in one place; "
                    f"remove {key}, or set bucket_config to None"
                )
        raise_together(*conflicts)
        return {**values, **sizes}

    def _rules(self) -> Iterator[Callable[[], object]]:
        yield from super()._rules()
        if self.bucket_config is None:
            yield self._latents_fit_model
        yield self._one_length
        yield self._buckets_fit
        yield self._training_precision

    def _clips(self) -> list[tuple[int, int, int]]:
        if self.bucket_config is None:
            return super()._clips()
        entries = Buckets.of(self.bucket_config).entries
        return [entry.shape_at(9 / 16) for entry in entries if entry.batch_size]

    def _latents_fit_model(self) -> None:
        check_input_size(self.model_spec.input_size, self.vae, self.num_frames, *self.size)

    def _one_length(self) -> None:
        if (self.max_steps == 0) == (self.epochs is None):
            advice = "set max_steps" if self.epochs is None else "set max_steps=0, or epochs=None"
            raise ValueError(
                f"got max_steps {self.max_steps} and epochs {self.epochs}; expected one of them, "
                f"the length of the run; {advice}"
            )

    def _buckets_fit(self) -> None:
        fitting = "VideoText" if self.bucket_config is None else "VariableVideoText"
        if self.dataset.type not in (fitting, "CachedFeatures"):
            found = "without" if self.bucket_config is None else "with"
            raise ValueError(
                f"got dataset.type {self.dataset.type!r} {found} bucket_config; "
                "expected 'VariableVideoText' with buckets, 'VideoText' without; change one of them"
            )

        spec = self.model_spec
        if self.bucket_config is not None and spec.input_size is not None:
            raise ValueError(
                f"got bucket_config for the model {spec.name!r}, whose position tables have "
                "one input_size; expected a model for any size; use STDiT2 or STDiT3"
            )

    @field_validator("mask_ratios")
    @classmethod
    def _mask_ratios(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None:
            check_mask_ratios(value)
        return value

    def _training_precision(self) -> None:
        if self.precision == "fp64":
            raise ValueError(
                "got precision 'fp64'; expected 'fp32', 'bf16' or 'fp16' for training; choose one"
            )


class InferenceConfig(Common):
    """A sampling run. If ``sp_size`` is None, it is chosen by estimated time.

    ``prompts`` are texts, or dicts of ``PromptOptions``. ``num_samples`` videos are sampled for
    each, from different noise. Videos are written as ``format``, single frames as PNG.

    ``reference_path`` and ``mask_strategy`` are the conditioning frames of prompts without their
    own. A ``loop`` after the first starts with the last ``condition_frame_length`` latent frames of
    the one before. These are generated again in the last ``condition_frame_edit`` of the schedule.
    """

    sp_size: int | None = Field(  # type: ignore[assignment]
        None,
        ge=1,
        description="Ranks that share each batch; None chooses the fastest by estimate.",
    )
    precision: Precision = Field("bf16", description="Data type of the model's computation.")
    fps: float = Field(24.0, gt=0, description="Frames per second, also an input of the model.")
    save_fps: float | None = Field(
        None, gt=0, description="Frames per second of the files; None is `fps`."
    )
    batch_size: int = Field(1, ge=1, description="Largest number of videos in a batch.")
    ckpt: str | None = Field(
        None, description="Weights: a run, a checkpoint, a Hugging Face folder or a file."
    )
    use_ema: bool = Field(True, description="Load the EMA weights of a checkpoint.")
    prompts: Prompts = Field(
        default_factory=list, description="Prompts: texts, or dicts of the options of one prompt."
    )
    prompt_path: str | None = Field(
        None, description=".txt or .csv file of prompts, if `prompts` is empty."
    )
    aes: float | None = Field(
        None,
        description="Aesthetic score appended to prompts, as in the release's training; None "
        "appends none.",
    )
    flow: float | None = Field(
        None, description="Motion score appended to prompts; None appends none."
    )
    camera_motion: str | None = Field(
        None, description="Camera motion appended to prompts; None appends none."
    )
    num_samples: int = Field(1, ge=1, description="Videos per prompt.")
    skip_existing: bool = Field(
        False, description="Skip videos that exist already from the same request."
    )
    format: Literal["mp4", "gif"] = Field(
        "mp4", description="File format of videos; single frames are PNG."
    )
    negative_prompt: str | None = Field(
        None, description="Negative prompt of classifier-free guidance; None is no caption."
    )
    reference_path: str | None = Field(
        None,
        description="Conditioning images and videos, separated by `;`; None is no conditioning.",
    )
    mask_strategy: str | None = Field(
        None, description="Placement of the conditioning frames; see docs/sampling.md."
    )
    loop: int = Field(1, ge=1, description="Parts of a video, each continuing the one before.")
    condition_frame_length: int = Field(
        5, ge=1, description="Latent frames that a part takes from the part before."
    )
    condition_frame_edit: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the noise schedule in which these frames are generated again.",
    )
    outputs: str = Field("samples", description="Folder of the samples.")
