"""The config keys of training runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from opensora_sp.common.importing import nearest
from opensora_sp.data.buckets import CHOSEN_AT_START, BatchSpec, Buckets, with_batch_sizes
from opensora_sp.data.dataset import ClipShape
from opensora_sp.data.transforms import Kind, Ratios, check_degradation
from opensora_sp.diffusion.conditioning_frames import check_mask_ratios, check_mask_types
from opensora_sp.diffusion.process import Share
from opensora_sp.models.recompute import levels_of
from opensora_sp.models.registry import models_for_any_size
from opensora_sp.parallel.rank_groups import check_degrees

from .common import Common, check_input_size
from .draft import raise_together
from .optimizer_options import Optimizer
from .sections import Dataset, Lora, Precision, Validation


def _unchanged(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """A validator that raises as ``check`` does."""

    def validate(content: Any) -> Any:
        check(content)
        return content

    return validate


Degrees: TypeAlias = int | Literal["auto"] | dict[str, int]
"""Ranks that share a micro-batch: of all, chosen for each, or by the name of its bucket."""
CheckedDegrees: TypeAlias = Annotated[Degrees, BeforeValidator(_unchanged(check_degrees))]
MaskRatios: TypeAlias = Annotated[dict[str, float], AfterValidator(_unchanged(check_mask_ratios))]
MaskTypes: TypeAlias = Annotated[dict[str, float], AfterValidator(_unchanged(check_mask_types))]


class TrainConfig(Common):
    """A training run.

    An optimizer step consumes ``micro_batches_per_step`` micro-batches of ``batch_size`` clips over
    all replicas (by default ``accumulation_steps`` each), whatever the number of processes is when
    the run resumes. ``max_steps`` or
    ``epochs`` is the length of the run. The watchdog (``runtime``) ends a run that cannot continue.

    ``bucket_config`` (see ``data/buckets.py``) is for mixed resolutions and lengths. Then
    ``num_frames``, ``image_size`` and ``batch_size`` describe its largest clips, at 16:9.
    """

    sp_size: CheckedDegrees = 1  # type: ignore[assignment]
    """Ranks that share each batch; 1 is no sequence parallelism. "auto" chooses a degree for each
    micro-batch, {'720p x 102': 4} sets the degree of buckets and chooses the others."""

    precision: Precision = "bf16"
    """Data type of the model's computation; fp64 is not for training."""

    zero_stage: Literal[1, 2] = 2
    """ZeRO stage: 1 shards optimizer states, 2 gradients as well."""

    overlap_communication: bool = True
    """Reduce gradients on another CUDA stream during backward; on CPU after backward."""

    dataset: Dataset
    """Training clips."""

    bucket_config: dict[str, dict[int, Any]] | None = None
    """{resolution: {frames: (keep probability, batch size)}}; see docs/data.md. Batch sizes of None
    are chosen at the start, so that steps fit into memory. None: one shape for all clips."""

    batch_size: int = Field(1, ge=1)
    """Clips of a micro-batch."""

    batch_order: Literal["by_cost", "mixed"] = "by_cost"
    """With buckets: a step takes micro-batches of nearly equal cost, or 'mixed' ones in random
    order, which are scheduled on the ranks so that all end together; see docs/mixed_sizes.md."""

    micro_batches_per_step: int | None = Field(None, ge=1)
    """Micro-batches of a step over all ranks; None is one per replica, per rank with 'auto'."""

    accumulation_steps: int = Field(1, ge=1)
    """Instead of `micro_batches_per_step`: micro-batches of a step for each replica at the first
    start. Above 1, ranks sum their gradients locally, in fp32, and reduce them once a step."""

    loss_weight: Literal["sample", "micro_batch"] = "sample"
    """The loss of a step is the mean over samples, or of the means of micro-batches as in
    Open-Sora; see docs/data.md."""

    num_workers: int = Field(0, ge=0)
    """Data loading processes per rank; 0 loads in the rank itself."""

    max_steps: int = Field(0, ge=0)
    """Optimizer steps of the run; 0 if `epochs` is set."""

    epochs: int | None = Field(None, ge=1)
    """Passes over the clips, instead of `max_steps`; each has as many steps as the first."""

    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up of the learning rate from 0."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or linear or cosine decay to 0 at `max_steps`."""

    optimizer: Optimizer = Optimizer()
    """Optimizer and its options."""

    freeze: tuple[str, ...] = ()
    """Patterns of frozen parameters, such as `y_embedder.*`; `!pattern` makes exceptions."""

    lora: Lora | None = None
    """Train and save low-rank adapters of the weights of `load`; None trains the weights."""

    grad_clip: float = Field(0.0, ge=0)
    """Largest global norm of the gradients; 0 is no clipping."""

    grad_checkpoint: bool | int | Literal["auto", "offload"] = False
    """Gradient checkpointing: recompute activations in backward to save memory. True for all
    blocks, a number for as many, "auto" for as little as the device's memory allows. "offload"
    also keeps the blocks' inputs in host memory, which "auto" does where nothing else fits."""

    deterministic: bool = False
    """Deterministic CUDA kernels: the same step gives the same bits, but is slower."""

    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the EMA weights per step."""

    ema_warmup: bool = True
    """The decay grows with the step up to `ema_decay`; False as in Open-Sora: it is constant."""

    log_every: int = Field(1, ge=1)
    """Steps between log lines."""

    ckpt_every: int = Field(1000, ge=1)
    """Steps between checkpoints; the last step has one as well."""

    keep_last: int | None = Field(None, ge=1)
    """Number of newest checkpoints to keep; None keeps all."""

    keep_every: int | None = Field(None, ge=1)
    """Also keep checkpoints at multiples of this many steps; None keeps no others."""

    async_save: bool = False
    """Write checkpoints asynchronously, in the background."""

    outputs: str = "outputs"
    """Folder of the run."""

    load: str | None = None
    """Initial weights: a run, a checkpoint, a folder, a file, or a name on the hub, with
    `@revision`; None initialises them randomly."""

    mask_ratios: MaskRatios | None = None
    """Probability of each strategy of conditioning frames; see docs/data.md. None: none."""

    mask_types: MaskTypes | None = None
    """Weight of each kind of conditioning frames of a model with `use_cond`, drawn for a
    micro-batch, as in Open-Sora 1.3; see docs/concepts/masks.md. None: none."""

    noise_augmentation: bool = False
    """Degrade the latents that noise is added to, by `noise_prob` and `noise_strength`, and predict
    the true ones, as in Open-Sora 1.3; see docs/data.md."""

    noise_prob: dict[Kind, Share] | None = None
    """With `noise_augmentation`: probability of each kind of degradation of a clip."""

    noise_strength: dict[Kind, Ratios | Share] | None = None
    """With `noise_augmentation`: ratios to draw from, or the largest share of noise, by kind."""

    validation: Validation | None = None
    """Sampling and held-out loss during training; None is off."""

    tensorboard: bool | Literal["auto"] = "auto"
    """Write TensorBoard's files; "auto": where it is installed."""

    wandb: bool = False
    """Also log to Weights & Biases."""

    max_bad_steps: int = Field(10, ge=1)
    """Consecutive steps with a non-finite loss or gradient, which are skipped, that end the run."""

    check_sync_every: int = Field(100, ge=0)
    """Steps between comparisons of weights and batches across ranks; 0 is off. Every 100 steps they
    take less than 0.1% of the time: each reads the weights once and sends 24 bytes to each rank."""

    peer_timeout: float = Field(60.0, ge=5)
    """Seconds without a heartbeat of another rank after which a rank ends."""

    collective_timeout: float = Field(1800.0, gt=0)
    """Seconds after which a collective that some rank has not joined ends the run."""

    grace_time: float = Field(300.0, gt=0)
    """Seconds for the last two steps and a checkpoint after SIGTERM, SIGUSR1 or Ctrl-C."""

    @model_validator(mode="before")
    @classmethod
    def _one_size_of_buckets(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("bucket_config") is None:
            return values

        largest = Buckets.of(values["bucket_config"]).largest
        sizes = {
            "num_frames": largest.num_frames,
            "image_size": tuple(largest.shape_at(9 / 16)[1:]),
            "batch_size": largest.batch_size or 1,
        }

        conflicts = []
        for key in (*sizes, "resolution", "aspect_ratio"):
            size = values.get(key)
            size = tuple(size) if isinstance(size, list) else size
            if size is not None and size != sizes.get(key):
                conflicts.append(
                    f"got {key} {size!r} with bucket_config; expected sizes in one place; "
                    f"remove {key}, or set bucket_config to None"
                )
        raise_together(*conflicts)
        return {**values, **sizes}

    @property
    def schedules_groups(self) -> bool:
        """True if the micro-batches of a step are scheduled on groups of ranks."""
        is_mixed = self.bucket_config is not None and self.batch_order == "mixed"
        return is_mixed or not isinstance(self.sp_size, int)

    @property
    def accumulates_locally(self) -> bool:
        """True if ranks sum gradients by themselves and reduce them once a step."""
        return self.schedules_groups or self.accumulation_steps > 1

    def micro_batches(self, replicas: int) -> int:
        """Micro-batches of a step over so many replicas, at the first start of a run."""
        return self.micro_batches_per_step or self.accumulation_steps * replicas

    def batches(self) -> dict[str, BatchSpec]:
        """The batches of training, by the name of their bucket; of each bucket at 16:9."""
        if self.bucket_config is None:
            return self._batches_of_one_size(self.batch_size)

        batches = {}
        for entry in Buckets.of(self.bucket_config).kept:
            shape = entry.shape_at(9 / 16)
            size = entry.batch_size or CHOSEN_AT_START
            batches[entry.name] = BatchSpec(size, shape.num_frames, (shape.height, shape.width))
        return batches

    def with_batch_sizes(self, sizes: Mapping[str, int]) -> TrainConfig:
        """The config with these batch sizes by the names of ``batches``; others stay."""
        if self.bucket_config is None:
            (size,) = sizes.values()
            return self.model_copy(update={"batch_size": size})
        bucket_config = with_batch_sizes(self.bucket_config, sizes)
        largest = Buckets.of(bucket_config).largest.batch_size
        return self.model_copy(update={"bucket_config": bucket_config, "batch_size": largest or 1})

    def _rules(self) -> Iterator[Callable[[], object]]:
        yield from super()._rules()
        # Buckets are for models of any size only.
        if self.bucket_config is None:
            yield self._latents_fit_model
        yield self._one_length
        yield self._one_number_of_micro_batches
        yield self._buckets_fit
        yield self._degrees_fit
        yield self._training_precision
        yield self._blocks_to_recompute
        yield self._lora_has_a_base
        yield self._condition_fits
        yield self._degradation_fits

    def _blocks_to_recompute(self) -> None:
        if self.grad_checkpoint != "auto":
            levels_of(self.grad_checkpoint, self.model_spec.config.num_blocks)

    def _lora_has_a_base(self) -> None:
        if self.lora is None:
            return
        if self.load is None:
            raise ValueError(
                "got lora without load; expected the weights that the adapters are for: "
                "checkpoints hold adapters alone; set load='PATH', or remove lora"
            )
        if self.freeze:
            raise ValueError(
                f"got freeze {self.freeze} with lora, which freezes all weights; expected one of "
                "them; remove freeze, and choose layers by lora.targets"
            )

    def _clips(self) -> list[ClipShape]:
        if self.bucket_config is None:
            return super()._clips()
        # The shapes of a bucket have nearly the same area: one of them stands for all.
        return [entry.shape_at(9 / 16) for entry in Buckets.of(self.bucket_config).kept]

    def _latents_fit_model(self) -> None:
        check_input_size(self.model_spec.input_size, self.vae, self.clip_shape)

    def _one_length(self) -> None:
        if (self.max_steps == 0) == (self.epochs is None):
            advice = "set max_steps" if self.epochs is None else "set max_steps=0, or epochs=None"
            raise ValueError(
                f"got max_steps {self.max_steps} and epochs {self.epochs}; expected one of them, "
                f"the length of the run; {advice}"
            )

    def _one_number_of_micro_batches(self) -> None:
        if self.micro_batches_per_step is not None and self.accumulation_steps > 1:
            raise ValueError(
                f"got micro_batches_per_step {self.micro_batches_per_step} and accumulation_steps "
                f"{self.accumulation_steps}; expected one of them, the micro-batches of a step "
                "over all replicas or for each; remove the other"
            )

    def _buckets_fit(self) -> None:
        fitting = "VideoText" if self.bucket_config is None else "VariableVideoText"
        if self.dataset.type not in (fitting, "CachedFeatures"):
            given = "without" if self.bucket_config is None else "with"
            raise ValueError(
                f"got dataset.type {self.dataset.type!r} {given} bucket_config; "
                "expected 'VariableVideoText' with buckets, 'VideoText' without; change one of them"
            )

        spec = self.model_spec
        if self.bucket_config is not None and spec.input_size is not None:
            raise ValueError(
                f"got bucket_config for the model {spec.name!r}, whose position tables have "
                f"one input_size; expected a model for any size; use one of {models_for_any_size()}"
            )

    def _degrees_fit(self) -> None:
        if not isinstance(self.sp_size, dict):
            return
        if self.bucket_config is None:
            raise ValueError(
                f"got sp_size {self.sp_size} without bucket_config; expected a map of the degrees "
                "of buckets only where there are some; set a number or 'auto'"
            )
        known = [entry.name for entry in Buckets.of(self.bucket_config).entries]
        for name in self.sp_size:
            if name not in known:
                raise ValueError(
                    f"got the bucket {name!r} in sp_size; expected one of {known}; "
                    f"{nearest(name, known)}"
                )

    def _condition_fits(self) -> None:
        if self.mask_types is not None:
            self._check_conditioned("mask_types", "mask_ratios", None)

    def _degradation_fits(self) -> None:
        if not self.noise_augmentation:
            return
        check_degradation(self.noise_prob, self.noise_strength)
        if self.dataset.type == "CachedFeatures" or self.scheduler["type"] != "rflow":
            raise ValueError(
                f"got noise_augmentation with dataset.type {self.dataset.type!r} and scheduler "
                f"{self.scheduler['type']!r}; expected video files, which are degraded as they are "
                "read, and 'rflow'; correct these, or remove noise_augmentation"
            )

    def _training_precision(self) -> None:
        if self.precision == "fp64":
            raise ValueError(
                "got precision 'fp64'; expected 'fp32', 'bf16' or 'fp16' for training; choose one"
            )
