"""What a config may say. Unknown keys are errors; every value is checked before a process or a
model exists.
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
from .findings import together
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
    """What training and sampling share.

    The frame size is ``image_size``, or ``resolution`` ("HxW", one number, or a name such as "240p"
    with its ``aspect_ratio``, "9:16"); ``num_frames`` a number or a name such as "2s". Names are
    those of Open-Sora 1.2. ``allow_pickle`` and ``convert`` are about the weights to begin with
    (``load``, ``ckpt``); see ``weights``.
    """

    num_frames: Frames = Field(description="Frames of a clip, 1 for images, or a name such as 2s.")
    resolution: str | int | None = Field(
        None,
        description="HEIGHTxWIDTH in pixels, the side of a square, or a name such as 240p with `aspect_ratio`.",
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
        description="Processes that share each batch; over 1 turns sequence parallelism on.",
    )
    sequence_parallel: SequenceParallel = Field(
        SequenceParallel(), description="How they share it."
    )
    seed: int = Field(42, ge=0, description="Of all random draws.")
    model: dict[str, Any] = Field(
        description="dict(type=..., ...): a model or preset, and its options."
    )
    compile: Literal["blocks"] | None = Field(
        None, description="'blocks' lets torch.compile compile the blocks."
    )
    vae: dict[str, Any] = Field(
        description="dict(type=..., ...): the video autoencoder, and its options."
    )
    text_encoder: dict[str, Any] = Field(
        description="dict(type=..., ...): the text encoder, and its options."
    )
    scheduler: dict[str, Any] = Field(
        default_factory=lambda: {"type": "rflow"},
        description="dict(type=..., ...): the diffusion process.",
    )
    allow_pickle: bool = Field(False, description="Also read pickled weights, which can run code.")
    convert: tuple[str, ...] = Field(
        (), description="Conversions of the weights to begin with; see docs/weights.md."
    )

    @model_validator(mode="after")
    def _values_fit(self) -> Common:
        self._one_frame_size()
        self._one_latent_size()
        together(*self._rules())
        return self

    def _one_frame_size(self) -> None:
        """``image_size``, whichever way the size is said."""
        if (self.resolution is None) == (self.image_size is None):
            raise ValueError(
                f"got resolution {self.resolution!r} and image_size {self.image_size!r}; expected "
                "exactly one of them; set resolution='512x512' or image_size=(512, 512)"
            )
        if self.resolution is None and self.aspect_ratio is not None:
            raise ValueError(
                f"got aspect_ratio {self.aspect_ratio!r} with image_size {self.image_size}; "
                "expected it with a named resolution; write resolution='240p' instead of "
                "image_size, or leave it away"
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
        """A model whose positions are made for one latent size gets that of the clips, unless it is
        said.
        """
        if "input_size" in self.model or self.model_spec.input_size is None:
            return

        latents = latent_size(self.vae, self.num_frames, *self.size)
        if latents is not None and min(latents) > 0:
            sized = {**self.model, "input_size": latents}
            ModelSpec.parse(sized)  # raises if the model cannot take this size
            self.model = sized

    def _rules(self) -> Iterator[Callable[[], object]]:
        """What values must be like together; each rule raises ValueError by itself."""
        yield self._scheduler_fits_model
        yield lambda: check_text_length(self.text_encoder, self.model_spec.config)
        for clip in self._clips():
            yield partial(check_latents, self.vae, *clip)

    def _clips(self) -> list[tuple[int, int, int]]:
        """Frames, height and width in pixels of the clips that the config names."""
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
    ``epochs`` says how long it goes on. ``watch`` says when a run that cannot go on ends.

    ``bucket_config`` (see ``data/buckets.py``) is for mixed resolutions and lengths;
    ``num_frames``, ``image_size`` and ``batch_size`` are then those of its largest clips, at 16:9,
    for whoever asks for one size.
    """

    precision: Precision = Field(
        "bf16", description="What the model computes in; fp64 cannot be trained in."
    )
    zero_stage: Literal[1, 2] = Field(
        2, description="ZeRO: 1 shards optimizer states, 2 gradients as well."
    )
    overlap_communication: bool = Field(
        True,
        description="Reduce gradients on a separate CUDA stream during backward; on a CPU, after it.",
    )
    dataset: Dataset = Field(description="The clips.")
    bucket_config: dict[str, dict[int, Any]] | None = Field(
        None,
        description="{resolution: {frames: (keep probability, batch size)}}; see docs/data.md.",
    )
    batch_size: int = Field(1, ge=1, description="Clips of a micro-batch.")
    micro_batches_per_step: int | None = Field(
        None,
        ge=1,
        description="Micro-batches of an optimizer step, over all replicas; None: one for each replica.",
    )
    num_workers: int = Field(
        0, ge=0, description="Processes that load clips, for each rank; 0 loads in the rank."
    )
    max_steps: int = Field(
        0, ge=0, description="Optimizer steps of the run; 0 where `epochs` says how many."
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="Length of the run in passes over the clips, of as many steps as the first.",
    )
    warmup_steps: int = Field(0, ge=0, description="Steps in which the learning rate rises from 0.")
    lr_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="After warm-up; cosine goes down to 0."
    )
    optimizer: Optimizer = Field(Optimizer(), description="How weights are changed.")
    freeze: tuple[str, ...] = Field(
        (),
        description="Parameters that stay as they are, by patterns such as `y_embedder.*`; `!pattern` takes some out "
        "again.",
    )
    grad_clip: float = Field(
        0.0, ge=0, description="Largest norm of the gradients; 0 leaves them alone."
    )
    grad_checkpoint: bool = Field(False, description="Recompute in backward, to save memory.")
    deterministic: bool = Field(
        False,
        description="Sum in a fixed order on CUDA, so that the same step gives the same bits; slower.",
    )
    ema_decay: float = Field(
        0.999, ge=0, lt=1, description="Decay of the averaged weights, per step."
    )
    log_every: int = Field(1, ge=1, description="Steps from one line of the log to the next.")
    ckpt_every: int = Field(
        1000, ge=1, description="Steps from one checkpoint to the next; the last step has one too."
    )
    keep_last: int | None = Field(
        None, ge=1, description="Keep this many of the newest checkpoints; None all."
    )
    keep_every: int | None = Field(
        None, ge=1, description="Also keep checkpoints of steps that this divides."
    )
    async_save: bool = Field(False, description="Write checkpoints in the background.")
    outputs: str = Field("outputs", description="The run's folder.")
    load: str | None = Field(
        None, description="Weights to begin with: a run, a checkpoint, a folder, a file."
    )
    mask_ratios: dict[str, float] | None = Field(
        None,
        description="How often which frames of a clip are given to the model; see docs/data.md.",
    )
    validation: Validation | None = Field(
        None, description="What is looked at while training; None is off."
    )
    wandb: bool = Field(False, description="Also log to Weights & Biases.")
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="What one device can do at best, in TFLOP/s, for the MFU; None: as known of the device.",
    )
    max_bad_steps: int = Field(
        10,
        ge=1,
        description="Steps without a finite loss and gradient are left out; so many in a row end the run.",
    )
    check_sync_every: int = Field(
        0,
        ge=0,
        description="Steps from one comparison of weights and batches between the ranks to the next; 0 never.",
    )
    peer_timeout: float = Field(
        60.0, ge=5, description="Seconds without a word from another rank after which a rank ends."
    )
    collective_timeout: float = Field(
        1800.0,
        gt=0,
        description="Seconds after which a collective that some rank has not joined ends the run; "
        "process groups time out 60 s later.",
    )
    grace_time: float = Field(
        300.0,
        gt=0,
        description="Seconds that a run which was asked to stop has for its last step and checkpoint.",
    )
    stopped_exit_code: Literal[0, 143] = Field(
        0, description="What a run returns that SIGTERM has stopped."
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
        given = {key: values.get(key) for key in (*sizes, "resolution", "aspect_ratio")}
        beside = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
        }
        together(
            *(
                f"got {key} {value!r} beside bucket_config; expected sizes in one place; remove "
                f"{key}, or set bucket_config to None"
                for key, value in beside.items()
                if value is not None and value != sizes.get(key)
            )
        )
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
        return [
            one.shape_at(9 / 16) for one in Buckets.of(self.bucket_config).entries if one.batch_size
        ]

    def _latents_fit_model(self) -> None:
        check_input_size(self.model_spec.input_size, self.vae, self.num_frames, *self.size)

    def _one_length(self) -> None:
        if (self.max_steps == 0) == (self.epochs is None):
            raise ValueError(
                f"got max_steps {self.max_steps} and epochs {self.epochs}; expected one of them to "
                "say how long the run is; "
                + ("set max_steps" if self.epochs is None else "set max_steps=0, or epochs=None")
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
                f"got bucket_config for the model {spec.name!r}, whose positions are made for one "
                "input_size; expected a model for any size; take STDiT2 or STDiT3"
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
    """A sampling run. Where ``sp_size`` is None, it is chosen by an estimate of the time.

    ``prompts`` are texts, or dicts of ``PromptOptions``; ``num_samples`` videos are made of each,
    from different noise. Videos are written as ``format``, single frames as PNG.

    ``reference_path`` and ``mask_strategy`` say what is given of the videos, where a prompt does
    not say it itself. A ``loop`` after the first goes on from the last ``condition_frame_length``
    latent frames of the one before, which are generated anew in the last ``condition_frame_edit``
    of the schedule.
    """

    sp_size: int | None = Field(  # type: ignore[assignment]
        None,
        ge=1,
        description="Processes that share each batch; None chooses by an estimate of the time.",
    )
    precision: Precision = Field("bf16", description="What the model computes in.")
    fps: float = Field(24.0, gt=0, description="Frames per second, which the model is told too.")
    save_fps: float | None = Field(
        None, gt=0, description="Frames per second of the files, where not `fps`."
    )
    batch_size: int = Field(1, ge=1, description="Videos of a batch, at most.")
    ckpt: str | None = Field(
        None, description="Weights: a run, a checkpoint, a Hugging Face folder, a file."
    )
    use_ema: bool = Field(True, description="Of a checkpoint, the averaged weights.")
    prompts: Prompts = Field(
        default_factory=list, description="Texts, or dicts of a prompt's options."
    )
    prompt_path: str | None = Field(
        None, description=".txt or .csv file of prompts, where `prompts` has none."
    )
    aes: float | None = Field(
        None, description="Aesthetic score that is added to prompts, as the release was trained."
    )
    flow: float | None = Field(None, description="Motion score that is added to prompts.")
    camera_motion: str | None = Field(
        None, description="Motion of the camera that is added to prompts."
    )
    num_samples: int = Field(1, ge=1, description="Videos of each prompt.")
    skip_existing: bool = Field(
        False, description="Leave out videos that are there already, of the same request."
    )
    format: Literal["mp4", "gif"] = Field("mp4", description="Kind of file.")
    negative_prompt: str | None = Field(
        None, description="What guidance moves away from, instead of no caption."
    )
    reference_path: str | None = Field(
        None, description="Images and videos that are given, separated by `;`."
    )
    mask_strategy: str | None = Field(
        None, description="Where their frames go; see docs/sampling.md."
    )
    loop: int = Field(
        1, ge=1, description="Parts of a video, each going on from the end of the one before."
    )
    condition_frame_length: int = Field(
        5, ge=1, description="Latent frames that a part takes from the one before."
    )
    condition_frame_edit: float = Field(
        0.0, ge=0, le=1, description="Share of the schedule in which these are generated anew."
    )
    outputs: str = Field("samples", description="Folder of the videos.")
