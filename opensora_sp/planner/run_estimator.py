"""A config on a number of GPUs: shapes, communication, memory and time of its batches."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Literal

from opensora_sp.config import InferenceConfig, TrainConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.diffusion import predictions_per_step
from opensora_sp.dtypes import DTYPES
from opensora_sp.encoders import planned_latent_size
from opensora_sp.models.attention_table import Platform
from opensora_sp.models.kernels import Kernels as KernelSetting
from opensora_sp.models.recompute import EVERYTHING, OFFLOADED, levels_of
from opensora_sp.parallel import Options, check_sp_size
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import GPUS
from opensora_sp.parallel.strategies import strategy_for, with_chunks
from opensora_sp.rank_groups import check_degrees_in, fixed_groups, nested_groups
from opensora_sp.runtime.cost_model_file import cost_model_of

from .attention_kernels import Kernels, attention_kernels
from .batches import BatchSpec
from .checkpointing import (
    COMPILED_LEVELS,
    LEVELS,
    budget_of,
    choose_levels,
    describe,
    mixed,
    offloaded_bytes,
    recomputed_share,
)
from .communicators import gpus_of_node
from .memory import MemoryPeak, ModelSizes, Persistent, Zero, sampling_peak, training_peak
from .micro_batch_time import ModelCosts, seconds_of
from .sampling_memory import FREE_SHARE, SamplingMemory, placed
from .step_time import StepTime, predict_step
from .trace import Activations, trace_activations
from .traffic import Traffic, output_gather, traffic

DEFAULT_MEMORY = 80e9  # bytes, for which grad_checkpoint="auto" is planned if no GPU is named


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, the busiest: without checkpointing, with it, and as the config sets it.

    ``levels`` is what each block keeps as configured (``models/recompute.py``), ``offloaded`` are
    the bytes of a micro-batch that go to the host and come back, ``pinned`` what the host keeps for
    them. Among several buckets only the peak as configured is estimated.
    """

    kept: Persistent
    plain: MemoryPeak | None
    checkpointed: MemoryPeak | None
    configured: MemoryPeak
    levels: list[int]
    offloaded: int = 0
    pinned: int = 0

    @property
    def recomputes(self) -> bool:
        return min(self.levels) < EVERYTHING

    def describe(self) -> str:
        """What blocks keep, for the log and the planner's table."""
        size = f": {self.pinned / 1e9:.3f} GB of a rank" if self.pinned else ""
        return describe(self.levels) + size


class RunEstimator:
    """A config on a number of GPUs; estimates its batches.

    Attributes:
        ranks: that share a batch with one degree; all, where each batch may have its own.
        reserved: bytes of ``memory_gb`` that a step may not take.
        kernels: that the traced models run, as ``set_kernels``. By default plain torch, with which
            a step takes as much memory as with any kernels.
        traced: activations by latents, ranks and level.
        video_frames: most frames of the videos of each latent size that was asked for.
    """

    def __init__(
        self,
        cfg: TrainConfig | InferenceConfig,
        num_gpus: int,
        memory_gb: float | None,
        device: str,
        gpu: str | None,
        gpus_per_node: int | None = None,
    ) -> None:
        self.cfg, self.num_gpus, self.memory_gb, self.device = cfg, num_gpus, memory_gb, device
        self.kernels: KernelSetting = "torch"
        self.traced: dict[tuple[tuple[int, ...], int, int], Activations] = {}
        self.video_frames: dict[tuple[int, ...], int] = {}
        self.gpu = None if gpu is None else GPUS[gpu]
        # Sampling without sp_size takes all ranks. So may any micro-batch with a degree of its own.
        self.ranks = cfg.sp_size if isinstance(cfg.sp_size, int) else num_gpus
        check_sp_size(self.ranks, num_gpus)
        self.gpus_per_node = gpus_of_node(num_gpus, gpus_per_node)
        self.reserved = 0.0
        if isinstance(cfg.sp_size, dict):
            check_degrees_in(cfg.sp_size, num_gpus, self.gpus_per_node)

        rates = cost_model_of(cfg.cost_model, default=GPUS[gpu or "H100"])
        self.options = cfg.parallel_options(rates)
        self.name, self.config = cfg.model_spec.name, cfg.model_spec.config
        self.dtype = DTYPES[cfg.precision]

        self.training = isinstance(cfg, TrainConfig)
        # In sampling, adapters are merged into the weights.
        self.lora = cfg.lora if isinstance(cfg, TrainConfig) else None
        self.checkpointing: bool | int | Literal["auto", "offload"] = False
        self.predictions = 1
        if isinstance(cfg, TrainConfig):
            self.checkpointing = cfg.grad_checkpoint
        else:
            process = build_component(cfg.scheduler, SCHEDULERS)
            by_frames = cfg.cond_type is not None
            self.predictions = predictions_per_step(process, by_frames=by_frames)

    def plan_kernels(self) -> str:
        """Trace the kernels of a run on a GPU that has verified them all; states which in words.

        Where Triton is not installed, as beside torch for CPUs, its kernels cannot be traced.
        """
        if self.cfg.kernels == "torch" or self.device == "cpu":
            return "in plain torch"
        if importlib.util.find_spec("triton") is None:
            return "in plain torch, since Triton is not installed here"
        self.kernels = "triton"
        return "with Triton kernels"

    @cached_property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.name, self.config, self.lora)

    @cached_property
    def platform(self) -> Platform | None:
        """The GPU that was named, with the packages of this environment."""
        if self.gpu is None:
            return None
        deterministic = getattr(self.cfg, "deterministic", False)
        return Platform.with_installed(self.gpu.capability, deterministic)

    def attention(self, latents: tuple[int, ...]) -> Kernels | None:
        """The kernels of attention on the GPU that was named."""
        if self.platform is None:
            return None
        triton = self.kernels != "torch"
        return attention_kernels(self.config, latents, self.dtype, self.platform, triton=triton)

    def latents(self, bucket: BatchSpec) -> tuple[int, ...]:
        """Shape of the model's input ``[B, c, frames, height, width]``.

        In sampling B counts all predictions of a step.
        """
        size = planned_latent_size(self.cfg.vae, bucket.num_frames, *bucket.image_size)
        self.video_frames[size] = max(bucket.num_frames, self.video_frames.get(size, 0))
        return bucket.batch_size * self.predictions, self.config.in_channels, *size

    def shape(self, bucket: BatchSpec) -> BatchShape:
        return self.shape_of(self.latents(bucket))

    def shape_of(self, latents: tuple[int, ...]) -> BatchShape:
        num_samples, _, frames, height, width = latents
        return BatchShape.of(self.config, num_samples, (frames, height, width))

    def micro_batches_on(self, ranks: int) -> int:
        """Micro-batches of a rank in a step whose micro-batches are all shared by so many ranks."""
        if not isinstance(self.cfg, TrainConfig):
            return 1
        # With a degree for each micro-batch, a step has some for each rank, not for each replica.
        has_replicas = isinstance(self.cfg.sp_size, int)
        of_step = self.cfg.micro_batches(self.num_gpus // (self.ranks if has_replicas else 1))
        return -(-of_step * ranks // self.num_gpus)

    def spans_nodes(self, ranks: int) -> bool:
        """Whether any group of so many ranks lies on several nodes."""
        if isinstance(self.cfg.sp_size, (str, dict)):
            groups = nested_groups(self.num_gpus, self.gpus_per_node)
        else:
            groups = fixed_groups(self.num_gpus, ranks)
        return any(one.spans_nodes(self.gpus_per_node) for one in groups if one.size == ranks)

    def options_on(self, ranks: int, latents: tuple[int, ...] | None = None) -> Options:
        """The options of sequence parallelism in a group of so many ranks; for a batch of this
        shape with the number of chunks that "auto" stands for.
        """
        options = replace(self.options, spans_nodes=self.spans_nodes(ranks))
        if latents is None:
            return options
        shape = self.shape_of(latents)
        return with_chunks(options, shape, ranks, element_size=self.dtype.itemsize)

    def traffic(
        self, shape: BatchShape, options: Options, ranks: int, *, recomputes: bool
    ) -> Traffic:
        sent = traffic(
            shape,
            options,
            ranks,
            element_size=self.dtype.itemsize,
            checkpointing=recomputes,
            training=self.training,
        )
        if self.training:
            return sent

        # Sampling gathers the output, which is fp32 or wider.
        volume = math.prod(self.config.patch_size)
        token_bytes = volume * self.config.out_channels * max(4, self.dtype.itemsize)
        strategy = strategy_for(shape, options, ranks)
        gathered = output_gather(shape, strategy, ranks, token_bytes)
        return replace(sent, forward=[a + b for a, b in zip(sent.forward, gathered, strict=True)])

    @cached_property
    def zero(self) -> Zero:
        """ZeRO's shards in training."""
        assert isinstance(self.cfg, TrainConfig)
        return Zero(
            world=self.num_gpus,
            stage=self.cfg.zero_stage,
            element_size=self.dtype.itemsize,
            accumulates=self.micro_batches_on(self.ranks) > 1,
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

    def memory(self, latents: tuple[int, ...], ranks: int, *, brief: bool = False) -> Memory:
        """Memory of one of ``ranks`` that share a batch; ``brief``: only as configured."""
        traced = partial(self.activations, latents, ranks)
        if not isinstance(self.cfg, TrainConfig):
            state = Persistent.sampling(self.sizes, self.dtype.itemsize)
            peak = sampling_peak(state, traced(EVERYTHING), self.config.depth)
            return Memory(state, peak, None, peak, [EVERYTHING])

        zero, state = self.zero, self.persistent

        @cache
        def peak_at(*levels: int) -> MemoryPeak:
            return training_peak(state, self.sizes, zero, mixed(traced, levels))

        levels = self._levels(lambda levels: peak_at(*levels).needed)
        of_inputs = partial(
            offloaded_bytes,
            levels,
            self.shape_of(latents),
            self.options_on(ranks),
            ranks,
            self.dtype.itemsize,
        )
        return Memory(
            state,
            plain=None if brief else peak_at(EVERYTHING),
            checkpointed=None if brief else peak_at(0),
            configured=peak_at(*levels),
            levels=levels,
            offloaded=of_inputs(),
            pinned=of_inputs(pinned=True),
        )

    def sampling_memory(
        self, spec: BatchSpec, memory: Memory
    ) -> tuple[InferenceConfig, SamplingMemory]:
        """Memory with the encoders, and the config of those that fit into ``memory_gb`` free GB.

        Args:
            spec: the largest batch, of which ``memory`` is that of the model alone.
        """
        assert isinstance(self.cfg, InferenceConfig)
        free = float("inf") if self.memory_gb is None else self.memory_gb * 1e9
        return placed(
            self.cfg,
            spec,
            memory.configured,
            memory.kept.total,
            memory=FREE_SHARE * free,
            device=self.device,
        )

    def _levels(self, needed: Callable[[Sequence[int]], float]) -> list[int]:
        """What each block keeps; ``needed`` are the bytes that a step takes with such levels."""
        if self.checkpointing != "auto":
            return levels_of(self.checkpointing, self.config.num_blocks)
        memory = DEFAULT_MEMORY if self.memory_gb is None else self.memory_gb * 1e9
        budget = budget_of(memory - self.reserved)
        return choose_levels(needed, budget, self.config.num_blocks, self.known_levels)

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
        """Predicted seconds of a micro-batch on the busiest of ``ranks``, by arithmetic; in
        sampling those of one step.
        """
        return seconds_of(
            self.shape_of(latents),
            self.options_on(ranks),
            ranks,
            model=self.costs,
            element_size=self.dtype.itemsize,
            recomputed=recomputed_share(levels),
            training=self.training,
        )

    @cached_property
    def costs(self) -> ModelCosts:
        return ModelCosts.of(self.name, self.config, self.lora)

    def time(self, latents: tuple[int, ...], levels: Sequence[int], ranks: int) -> StepTime | None:
        """Predicted for a training step in 16 bits, if a GPU was named."""
        if self.gpu is None or not self.training or self.dtype.itemsize != 2:
            return None
        return predict_step(
            self.name,
            self.config,
            latents,
            gpu=self.gpu,
            options=self.options_on(ranks, latents),
            ranks=ranks,
            world=self.num_gpus,
            world_spans_nodes=self.spans_nodes(self.num_gpus),
            dtype=self.dtype,
            levels=levels,
            micro_batches=self.micro_batches_on(ranks),
            accumulates_locally=self.zero.accumulates_locally,
            kernels=self.kernels,
            lora=self.lora,
            num_frames=self.video_frames.get(latents[2:]),
        )

    def activations(self, latents: tuple[int, ...], ranks: int, level: int) -> Activations:
        """Traced with all blocks at one level of gradient checkpointing, once."""
        key = (latents, ranks, level)
        if key not in self.traced:
            self.traced[key] = self._trace(*key)
        return self.traced[key]

    def _trace(self, latents: tuple[int, ...], ranks: int, level: int) -> Activations:
        return trace_activations(
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
