"""A config on a number of GPUs: memory, bytes sent and seconds of its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import add
from typing import Any, Literal

from opensora_sp.common.tensors import DTYPES
from opensora_sp.config import InferenceConfig, TrainConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.data.buckets import BatchSpec
from opensora_sp.diffusion.cached_steps import SamplingStep, sampling_steps
from opensora_sp.diffusion.guidance import predictions_per_step
from opensora_sp.encoders import planned_latent_size
from opensora_sp.models.kernels.fused import Kernels as KernelSetting
from opensora_sp.models.recompute import EVERYTHING, OFFLOADED, levels_of
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import H100, CostModel
from opensora_sp.parallel.mesh import check_sp_size
from opensora_sp.parallel.options import Options
from opensora_sp.parallel.rank_groups import check_degrees_in, fixed_groups, nested_groups
from opensora_sp.parallel.strategies import strategy_for, with_chunks
from opensora_sp.runtime.cost_models import cost_model_of

from .memory import (
    COMPILED_LEVELS,
    LEVELS,
    MemoryPeak,
    ModelSizes,
    Persistent,
    Zero,
    budget_of,
    choose_levels,
    describe,
    mixed,
    pinned_bytes,
    recomputed_share,
    training_peak,
)
from .seconds import ModelFlops, seconds_of
from .trace import Activations, trace_activations
from .traffic import GPUS_OF_NODE, Traffic, communicators, output_gather, traffic

DEFAULT_MEMORY = 80e9  # bytes, for which grad_checkpoint="auto" is planned if no GPU is named


@dataclass(frozen=True)
class Memory:
    """Bytes of the busiest rank: state that it keeps, and the peak of a step.

    ``levels`` is what each block keeps (``models/recompute.py``), ``pinned`` are the bytes of the
    host's memory for inputs of blocks.
    """

    kept: Persistent
    peak: MemoryPeak
    levels: list[int]
    pinned: int = 0

    def describe(self) -> str:
        """Activations that blocks keep, for the log and the planner's table."""
        size = f": {self.pinned / 1e9:.3f} GB of a rank" if self.pinned else ""
        return describe(self.levels) + size


@dataclass(frozen=True)
class Estimate:
    """A micro-batch on the ranks that share it; in sampling, a call of the model.

    ``traffic`` are the bytes that each rank sends, ``seconds`` are of the busiest rank.
    """

    memory: Memory
    traffic: Traffic
    seconds: float


class RunEstimator:
    """A config on a number of GPUs; estimates its batches.

    Attributes:
        ranks: that share a batch with one degree; all, where each batch may have its own.
        has_one_degree: False if each micro-batch may have its own degree.
        communicators: see ``traffic.communicators``; none with one degree, for whose group the
            planner's reserve stands.
        memory: bytes of a device, less all communicators but the largest.
        kernels: that the traced models run, as ``set_kernels``. By default plain torch, with which
            a step takes as much memory as with any kernels.
        traced: activations by latents, ranks and level.
        video_frames: most frames of the videos of each latent size that was asked for.
    """

    def __init__(
        self,
        cfg: TrainConfig | InferenceConfig,
        num_gpus: int,
        memory: float | None = None,
        *,
        device: str = "cuda",
        rates: CostModel | None = None,
        gpus_per_node: int | None = None,
    ) -> None:
        """
        Args:
            memory: bytes of a device, less the encoders; None is ``DEFAULT_MEMORY`` in
                training, and no limit in sampling.
            device: "cuda" or "cpu".
            rates: by which seconds are predicted; None is the config's, or an H100's.
            gpus_per_node: None is 8, or all if they are fewer.

        Raises:
            ValueError: if the config's ``sp_size`` does not fit the number of GPUs.
        """
        self.cfg, self.num_gpus, self.device = cfg, num_gpus, device
        self.kernels: KernelSetting = "torch"
        self.device_memory, self.knows_nodes = memory, gpus_per_node is not None
        self.traced: dict[tuple[tuple[int, ...], int, int], Activations] = {}
        self.video_frames: dict[tuple[int, ...], int] = {}
        # Sampling without sp_size takes all ranks. So may any micro-batch with a degree.
        self.ranks = cfg.sp_size if isinstance(cfg.sp_size, int) else num_gpus
        check_sp_size(self.ranks, num_gpus)
        self.gpus_per_node = gpus_per_node or min(num_gpus, GPUS_OF_NODE)
        if isinstance(cfg.sp_size, dict):
            check_degrees_in(cfg.sp_size, num_gpus, self.gpus_per_node)
        self.has_one_degree = cfg.sp_size is None or isinstance(cfg.sp_size, int)
        self.communicators: list[int] = []
        if not self.has_one_degree:
            self.communicators = communicators(num_gpus, self.gpus_per_node)

        rates = rates or cost_model_of(cfg.cost_model, default=H100)
        self.options = cfg.parallel_options(rates)
        self.name, self.config = cfg.model_spec.name, cfg.model_spec.config
        self.dtype = DTYPES[cfg.precision]

        self.training = isinstance(cfg, TrainConfig)
        # In sampling, adapters are merged into the weights.
        self.lora = cfg.lora if isinstance(cfg, TrainConfig) else None
        self.checkpointing: bool | int | Literal["auto", "offload"] = False
        self.predictions, self.is_cached = 1, False
        if isinstance(cfg, TrainConfig):
            self.checkpointing = cfg.grad_checkpoint
        else:
            self.process: Any = build_component(cfg.scheduler, SCHEDULERS)
            by_frames = cfg.cond_type is not None
            self.predictions = predictions_per_step(self.process, by_frames=by_frames)
            # Some steps keep the residual of the blocks.
            self.is_cached = getattr(self.process, "cache_threshold", 0) > 0

        if memory is None:
            memory = DEFAULT_MEMORY if self.training else math.inf
        self.memory = memory
        # CPUs exchange through memory that is not a rank's.
        if device == "cuda":
            self.memory -= sum(self.communicators[1:])

    @property
    def kernels_in_words(self) -> str:
        return "with Triton kernels" if self.kernels == "triton" else "in plain torch"

    @property
    def adapters(self) -> int | None:
        """Parameters of the adapters that are trained alone; None without LoRA."""
        return None if self.lora is None else sum(self.sizes.trainable)

    @cached_property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.name, self.config, self.lora)

    def latents(self, bucket: BatchSpec, step: SamplingStep | None = None) -> tuple[int, ...]:
        """Shape of the model's input ``[B, c, frames, height, width]``.

        In sampling B counts all predictions of a step, by default of one with guidance.
        """
        size = planned_latent_size(self.cfg.vae, bucket.num_frames, *bucket.image_size)
        self.video_frames[size] = max(bucket.num_frames, self.video_frames.get(size, 0))
        predictions = self.predictions if step is None or step.guided else 1
        return bucket.batch_size * predictions, self.config.in_channels, *size

    def steps(self, bucket: BatchSpec) -> list[SamplingStep]:
        """The sampling steps of a batch.

        Raises:
            ValueError: if the guidance interval holds none.
        """
        shape = (bucket.num_frames, *bucket.image_size)
        return sampling_steps(self.process, shape, self.latents(bucket)[2])

    def shape_of(self, latents: tuple[int, ...]) -> BatchShape:
        num_samples, _, frames, height, width = latents
        return BatchShape.of(self.config, num_samples, (frames, height, width))

    def spans_nodes(self, ranks: int) -> bool:
        """True if any group of so many ranks lies on several nodes."""
        groups = fixed_groups(self.num_gpus, ranks)
        if not self.has_one_degree:
            groups = nested_groups(self.num_gpus, self.gpus_per_node)
        sizes = {group.size for group in groups if group.spans_nodes(self.gpus_per_node)}
        return ranks in sizes

    def options_on(self, ranks: int, latents: tuple[int, ...] | None = None) -> Options:
        """The options of sequence parallelism in a group of so many ranks; for a batch of this
        shape with the number of chunks that "auto" stands for.
        """
        options = replace(self.options, spans_nodes=self.spans_nodes(ranks))
        if latents is None:
            return options
        shape = self.shape_of(latents)
        return with_chunks(options, shape, ranks, element_size=self.dtype.itemsize)

    def estimate(self, latents: tuple[int, ...], ranks: int) -> Estimate:
        """A micro-batch on the busiest of ``ranks`` that share it.

        Args:
            latents: ``(B, c, frames, height, width)``.
        """
        memory = self.memory_of(latents, ranks)
        sent = self.traffic(self.shape_of(latents), ranks, memory.levels)
        return Estimate(memory, sent, self.seconds(latents, ranks, memory.levels))

    def traffic(self, shape: BatchShape, ranks: int, levels: Sequence[int]) -> Traffic:
        """Bytes that each rank sends; in sampling with the gather of the output."""
        options = self.options_on(ranks)
        sent = traffic(
            shape,
            options,
            ranks,
            element_size=self.dtype.itemsize,
            checkpointing=min(levels) < EVERYTHING,
            training=self.training,
        )
        if self.training:
            return sent

        # The output is fp32 or wider.
        volume = math.prod(self.config.patch_size)
        token_bytes = volume * self.config.out_channels * max(4, self.dtype.itemsize)
        gathered = output_gather(shape, strategy_for(shape, options, ranks), ranks, token_bytes)
        return replace(sent, forward=list(map(add, sent.forward, gathered)))

    @cached_property
    def zero(self) -> Zero:
        """ZeRO's shards in training."""
        assert isinstance(self.cfg, TrainConfig)
        replicas = self.num_gpus // self.ranks
        return Zero(
            world=self.num_gpus,
            stage=self.cfg.zero_stage,
            element_size=self.dtype.itemsize,
            accumulates=self.cfg.micro_batches(replicas) > replicas,
            accumulates_locally=self.cfg.accumulates_locally,
        )

    @cached_property
    def persistent(self) -> Persistent:
        """The state that training keeps."""
        assert isinstance(self.cfg, TrainConfig)
        optimizer = self.cfg.optimizer
        return Persistent.training(
            self.sizes,
            self.zero,
            moments=len(optimizer.moments),
            scalars=len(optimizer.scalars),
            saves_frozen=self.lora is None,
        )

    def peak(self, latents: tuple[int, ...], ranks: int, levels: Sequence[int]) -> MemoryPeak:
        """The peak of a training step whose blocks have these levels."""
        traced = partial(self.activations, latents, ranks)
        return training_peak(self.persistent, self.sizes, self.zero, mixed(traced, levels))

    def memory_of(self, latents: tuple[int, ...], ranks: int) -> Memory:
        """Memory of one of ``ranks`` that share a batch."""
        if not self.training:
            return self._sampling_memory(latents, ranks)

        levels = self._levels(lambda levels: self.peak(latents, ranks, levels).needed)
        pinned = pinned_bytes(
            levels, self.shape_of(latents), self.options_on(ranks), ranks, self.dtype.itemsize
        )
        return Memory(self.persistent, self.peak(latents, ranks, levels), levels, pinned)

    def _sampling_memory(self, latents: tuple[int, ...], ranks: int) -> Memory:
        traced = self.activations(latents, ranks, EVERYTHING)
        weights, live = self.sizes.total * self.dtype.itemsize, round(traced.at(self.config.depth))
        if self.is_cached:
            # The blocks' input, in the layouts of input and output, till they have run.
            shape = self.shape_of(latents)
            layouts = strategy_for(shape, self.options_on(ranks), ranks).token_layouts(shape)
            tokens = sum(max(shape.entries(layout, ranks)) for layout in layouts)
            live += tokens * shape.width * self.dtype.itemsize
        peak = MemoryPeak(weights + live, "forward", 0, live, traced.largest)
        return Memory(Persistent(weights), peak, [EVERYTHING])

    def _levels(self, needed: Callable[[Sequence[int]], float]) -> list[int]:
        """The level of each block; ``needed`` are the bytes that a step takes with such levels."""
        if self.checkpointing != "auto":
            return levels_of(self.checkpointing, self.config.num_blocks)
        return choose_levels(needed, self.budget, self.config.num_blocks, self.known_levels)

    @property
    def budget(self) -> float:
        """Bytes that a training step may take."""
        return budget_of(self.memory)

    @property
    def known_levels(self) -> tuple[int, ...]:
        """The levels that ``grad_checkpoint="auto"`` chooses from, in ascending order."""
        levels = COMPILED_LEVELS if self.cfg.compile == "blocks" else LEVELS
        if self.device == "cpu":
            # What is on the host takes as much of the same memory.
            levels = tuple(level for level in levels if level != OFFLOADED)
        return levels

    @property
    def lowest_levels(self) -> list[list[int]]:
        """Levels with which a step needs little memory, then those with which it needs the least.

        Those of the config, unless it leaves the choice to the run.
        """
        if self.checkpointing != "auto":
            return [levels_of(self.checkpointing, self.config.num_blocks)]
        levels = [level for level in (0, OFFLOADED) if level in self.known_levels]
        return [[level] * self.config.num_blocks for level in levels]

    def seconds(self, latents: tuple[int, ...], ranks: int, levels: Sequence[int]) -> float:
        """Predicted seconds of a micro-batch on the busiest rank; in sampling of one step."""
        return seconds_of(
            self.shape_of(latents),
            self.options_on(ranks),
            ranks,
            model=self.flops,
            element_size=self.dtype.itemsize,
            recomputed=recomputed_share(levels),
            training=self.training,
        )

    @cached_property
    def flops(self) -> ModelFlops:
        return ModelFlops.planned(self.name, self.config, self.lora)

    def activations(self, latents: tuple[int, ...], ranks: int, level: int) -> Activations:
        """Traced with all blocks at one level of gradient checkpointing, once."""
        key = (latents, ranks, level)
        if key not in self.traced:
            self.traced[key] = trace_activations(
                self.name,
                self.config,
                latents,
                options=self.options_on(ranks, latents),
                ranks=ranks,
                dtype=self.dtype,
                level=level,
                training=self.training,
                device=self.device,
                kernels=self.kernels,
                lora=self.lora,
                num_frames=self.video_frames.get(latents[2:]),
            )
        return self.traced[key]
