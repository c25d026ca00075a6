"""The config keys that training and sampling share, and checks that their values fit together.

Unknown keys are errors. All values are checked before a process group or a model exists: clips,
autoencoder, text encoder and model are compared without building them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from opensora_sp.checkpoint.model_config import check_text_length
from opensora_sp.checkpoint.state_dict import check_conversions
from opensora_sp.common.importing import component_class
from opensora_sp.data.buckets import BatchSpec
from opensora_sp.data.dataset import ClipShape, ExtraFiles
from opensora_sp.data.limits import Limits
from opensora_sp.diffusion.cached_steps import check_curve, read_curve
from opensora_sp.encoders import LATENT_ENCODERS, TEXT_ENCODERS, LatentEncoder, planned_latent_size
from opensora_sp.encoders.interface import TextEncoder
from opensora_sp.models.extra_inputs import cut_as_frames, extra_shapes
from opensora_sp.models.kernels.fused import Kernels
from opensora_sp.models.registry import model_class
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.options import Options

from .components import (
    SCHEDULERS,
    ModelSpec,
    build_component,
    check_component,
    check_options,
    split_type,
)
from .draft import raise_together
from .sections import Frames, Seed, SequenceParallel, Strict, frame_size


def latent_size(vae: dict[str, Any], clip: ClipShape) -> tuple[int, int, int] | None:
    """Frames, height and width of a clip's latents; None if only a built autoencoder knows."""
    # Only the classes of this package, and classes with the method, are asked without weights.
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
    """Files of a model's further inputs; None if it has none."""
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
            f"{input_size}; expected the same; remove input_size, which then follows from "
            "the clips, or change the clips"
        )


def _text(clip: ClipShape) -> str:
    frames, height, width = clip
    return f"{frames} frames of {height}x{width} pixels (num_frames, image_size)"


def check_text(text_encoder: dict[str, Any], model_config: Any) -> None:
    """Raise ValueError if a model cannot take the features of a text encoder."""
    name, options = split_type("text_encoder", text_encoder)
    parameters = inspect.signature(component_class("text_encoder", name, TEXT_ENCODERS)).parameters
    default = getattr(parameters.get("max_length"), "default", None)
    length = options.get("max_length", default)
    if isinstance(length, int):
        check_text_length(length, model_config)


def _checked_model(section: dict[str, Any]) -> dict[str, Any]:
    name, options = split_type("model", section)
    checked = {"type": name, **check_options("model", options, model_class(name).Config)}
    ModelSpec.parse(checked)
    return checked


def _checked_scheduler(section: dict[str, Any]) -> dict[str, Any]:
    section = {"type": "rflow", **section}
    # Every rank, and the metadata of videos, have the curve itself.
    if isinstance(section.get("cache_curve"), str):
        section["cache_curve"] = read_curve(section["cache_curve"])
    return check_component("scheduler", section, SCHEDULERS)


_checked_vae = partial(check_component, "vae", known=LATENT_ENCODERS, protocol=LatentEncoder)
_checked_text_encoder = partial(
    check_component, "text_encoder", known=TEXT_ENCODERS, protocol=TextEncoder
)


class Common(Strict):
    """Keys of both training and sampling.

    The frame size is ``image_size``, or ``resolution`` ("HxW", one number, or a name such as "240p"
    with an ``aspect_ratio`` such as "9:16"). ``num_frames`` is a number or a name such as "2s".
    Names are as in Open-Sora 1.2. ``allow_pickle`` and ``convert`` concern the initial weights
    (``load``, ``ckpt``).
    """

    num_frames: Frames
    """Frames of a clip; 1 for images, or a name such as 2s."""

    resolution: str | int | None = None
    """HEIGHTxWIDTH in pixels, the side of a square, or a name such as 240p with `aspect_ratio`."""

    aspect_ratio: str | None = None
    """HEIGHT:WIDTH such as 9:16, with a named `resolution`."""

    image_size: tuple[int, int] | None = None
    """(height, width) in pixels, instead of `resolution`."""

    sp_size: int = Field(1, ge=1)
    """Ranks that share each batch; 1 is no sequence parallelism."""

    sequence_parallel: SequenceParallel = SequenceParallel()
    """Options of sequence parallelism."""

    cost_model: str | None = None
    """Speed of devices and links, by which ranks share work: "H100", "H200", "CPU", or a file that
    `opensora-sp plan --calibrate` has written. None is the preset of the device."""

    seed: Seed = 42
    """Seed of all random draws."""

    model: Annotated[dict[str, Any], AfterValidator(_checked_model)]
    """dict(type=..., ...): model class or preset, and its options."""

    compile: Literal["blocks"] | None = None
    """'blocks' compiles each block with torch.compile; None is eager mode."""

    kernels: Kernels = "auto"
    """'auto' runs the Triton kernels that passed verification on this device, 'triton' requires
    that all do, on CUDA and not in fp64, 'torch' runs none."""

    vae: Annotated[dict[str, Any], AfterValidator(_checked_vae)]
    """dict(type=..., ...): video autoencoder, and its options."""

    text_encoder: Annotated[dict[str, Any], AfterValidator(_checked_text_encoder)]
    """dict(type=..., ...): text encoder, and its options."""

    scheduler: Annotated[dict[str, Any], AfterValidator(_checked_scheduler)] = {"type": "rflow"}
    """dict(type=..., ...): diffusion process, and its options."""

    allow_types: tuple[str, ...] = ()
    """Importable classes, such as `my_package.MyVAE`, that --cfg-options may name as a `type`;
    only config files can set it."""

    limits: Limits = Limits()
    """Largest frames, clips and files that are decoded or sampled."""

    allow_pickle: bool = False
    """Also read pickled weights: shapes and bytes of tensors; nothing in them is executed."""

    convert: Annotated[tuple[str, ...], AfterValidator(check_conversions)] = ()
    """Conversions of the initial weights, by name; see docs/weights.md."""

    @model_validator(mode="after")
    def _values_fit(self) -> Common:
        # Sizes first: the rules read them.
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
            # A dumped config has one of the two, and loads again.
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

        latents = latent_size(self.vae, self.clip_shape)
        if latents is not None and min(latents) > 0:
            sized = {**self.model, "input_size": latents}
            # Raises if the model cannot take this size.
            ModelSpec.parse(sized)
            self.model = sized

    def _rules(self) -> Iterator[Callable[[], object]]:
        """Checks of several values together; each raises ValueError on its own."""
        yield self._scheduler_fits_model
        yield lambda: check_text(self.text_encoder, self.model_spec.config)
        for clip in self._clips():
            yield partial(self.limits.check, "clips", *clip)
            yield partial(check_latents, self.vae, clip)

    def _clips(self) -> list[ClipShape]:
        """All shapes of clips."""
        return [self.clip_shape]

    def _scheduler_fits_model(self) -> None:
        model = self.model_spec.config
        scheduler = build_component(self.scheduler, SCHEDULERS)
        scheduler.check_channels(model.in_channels, model.out_channels)
        if getattr(scheduler, "cache_threshold", 0) > 0:
            check_curve(scheduler.cache_curve, self.model_spec.model_class, model)

    def _check_conditioned(self, setting: str, key: str, wanted: Any) -> None:
        """Raise ValueError unless the model takes conditioning frames, and a key is as wanted."""
        takes_frames = getattr(self.model_spec.config, "use_cond", False)
        scheduler, current = self.scheduler["type"], getattr(self, key)
        if not takes_frames or scheduler != "rflow" or current != wanted:
            raise ValueError(
                f"got {setting} with model.use_cond {takes_frames}, scheduler {scheduler!r} and "
                f"{key} {current}; expected a model with use_cond=True, 'rflow' and "
                f"{key}={wanted}; correct these, or remove {setting.partition(' ')[0]}"
            )

    def parallel_options(self, cost_model: CostModel) -> Options:
        """The options of ``sequence_parallel``, with the rates that choices depend on."""
        return Options(**dict(self.sequence_parallel), cost_model=cost_model)

    @property
    def model_spec(self) -> ModelSpec:
        """``model``, parsed."""
        return ModelSpec.parse(self.model)

    @property
    def extra_files(self) -> ExtraFiles | None:
        """Files of the model's further inputs (``extra_inputs``); None if it has none."""
        return extra_files(self.model_spec, self.vae)

    @property
    def clip_shape(self) -> ClipShape:
        """Frames, height and width of a clip; of the largest, with buckets."""
        return ClipShape(self.num_frames, *self.size)

    def _batches_of_one_size(self, batch_size: int) -> dict[str, BatchSpec]:
        name = f"{self.size[0]}x{self.size[1]} x {self.num_frames}"
        return {name: BatchSpec(batch_size, self.num_frames, self.size)}

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        assert self.image_size is not None
        return self.image_size
