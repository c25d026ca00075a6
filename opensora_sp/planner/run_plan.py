"""The plan of a config: strategy, communication, memory and advice for each bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

from opensora_sp.config import InferenceConfig, TrainConfig, build_component
from opensora_sp.config.components import SCHEDULERS
from opensora_sp.data import Buckets
from opensora_sp.dtypes import DTYPES
from opensora_sp.encoders import planned_latent_size
from opensora_sp.models.attention_table import Platform
from opensora_sp.models.recompute import EVERYTHING, OFFLOADED, levels_of
from opensora_sp.parallel import Options, check_sp_size
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import GPUS
from opensora_sp.parallel.cost_model_file import cost_model_of
from opensora_sp.parallel.mesh import spans_nodes
from opensora_sp.parallel.strategies import (
    applicable_strategy,
    strategy_for,
    strategy_options,
    with_chunks,
)

from .attention_kernels import Kernels, attention_kernels
from .checkpointing import (
    COMPILED_LEVELS,
    LEVELS,
    budget_of,
    choose_levels,
    describe,
    mixed,
    offloaded_bytes,
)
from .memory import MemoryPeak, ModelSizes, Persistent, Zero, sampling_peak, training_peak
from .sharing import Sharing, sharing_of
from .step_time import StepTime, predict_step
from .trace import Activations, trace_activations
from .traffic import Traffic, output_gather, tokens_changing_rank, traffic

UNEVEN = 0.03  # imbalance above which a better one is searched for
FRAMES_AROUND = 8  # frame counts tried below and above
DEFAULT_MEMORY = 80e9  # bytes, for which grad_checkpoint="auto" is planned if no GPU is named


@dataclass(frozen=True)
class BatchSpec:
    """Batches of ``batch_size`` clips of ``num_frames`` frames, ``image_size`` pixels each."""

    batch_size: int
    num_frames: int
    image_size: tuple[int, int]


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


@dataclass(frozen=True)
class BatchEstimate:
    """The estimate of one bucket.

    ``traffic`` is per rank and micro-batch (sampling: per call of the model); ``compared`` is by
    strategy. ``tokens_changing_rank`` counts those that one switch between the layouts moves.
    ``time`` is predicted for training in 16 bits on a GPU that was named, ``attention`` are the
    kernels on that GPU. Among several buckets there is neither a comparison nor advice.
    """

    bucket: BatchSpec
    tokens: dict[str, int]
    sharing: Sharing
    tokens_changing_rank: int
    traffic: Traffic
    compared: dict[str, Traffic]
    memory: Memory
    time: StepTime | None
    attention: Kernels | None
    advice: list[str]


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    ``micro_batches`` of one rank in one optimizer step; ``spans_nodes`` is None for unknown nodes;
    ``versions`` are those that the kernels on ``gpu`` depend on, as installed here.
    """

    purpose: str
    model: str
    parameters: int
    num_gpus: int
    sp_size: int
    dp_size: int
    precision: str
    grad_checkpoint: bool | int | str
    micro_batches: int
    spans_nodes: bool | None
    memory_gb: float | None
    gpu: str | None
    versions: str | None
    buckets: list[BatchEstimate]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values, with the means and sums that the table shows."""
        values = asdict(self)
        for bucket, shown in zip(self.buckets, values["buckets"], strict=True):
            shown["memory"]["kept"]["total"] = bucket.memory.kept.total
            shown["memory"]["configured"]["needed"] = bucket.memory.configured.needed

            if bucket.time is not None:
                shown["time"]["is_launch_bound"] = bucket.time.is_launch_bound

            shown["traffic"].update(mean=bucket.traffic.mean, busiest=bucket.traffic.busiest)
            for name, sent in bucket.compared.items():
                shown["compared"][name].update(mean=sent.mean, busiest=sent.busiest)
        return values


def buckets_of(cfg: TrainConfig | InferenceConfig) -> list[BatchSpec]:
    """The shapes of batches that a config makes; of each bucket the one at 16:9."""
    if not isinstance(cfg, TrainConfig) or cfg.bucket_config is None:
        return [BatchSpec(cfg.batch_size, cfg.num_frames, cfg.size)]

    found = []
    for entry in Buckets.of(cfg.bucket_config).entries:
        if entry.batch_size:
            shape = entry.shape_at(9 / 16)
            size = shape.height, shape.width
            found.append(BatchSpec(entry.batch_size, shape.num_frames, size))
    return found


def plan(
    cfg: TrainConfig | InferenceConfig,
    num_gpus: int,
    *,
    gpus_per_node: int | None = None,
    memory_gb: float | None = None,
    gpu: str | None = None,
    device: str = "cuda",
    progress: Callable[[list[BatchSpec]], Iterable[BatchSpec]] = iter,
) -> Plan:
    """Plan a config's run on ``num_gpus`` processes. Needs no process group, no GPU and no weights.

    Args:
        gpus_per_node: to determine whether a sequence-parallel group spans nodes.
        memory_gb: memory of one GPU in GB (1e9 bytes), to report what does not fit.
        gpu: a name in ``GPUS``, to predict the time of a step, and for its memory unless
            ``memory_gb`` is passed.
        device: "cuda" or "cpu", on which torch's AdamW and its allocator work differently.
        progress: iterates over the buckets and may show how far it is.

    Raises:
        ValueError: if the numbers do not fit each other or the config.
    """
    _check_numbers(num_gpus, gpus_per_node, memory_gb)
    if gpu is not None and gpu not in GPUS:
        raise ValueError(f"got --gpu {gpu!r}; expected one of {list(GPUS)}; correct the name")
    if memory_gb is None and gpu is not None:
        memory_gb = GPUS[gpu].memory / 1e9
    run, buckets = _Run(cfg, num_gpus, memory_gb, device, gpu, gpus_per_node), buckets_of(cfg)
    return Plan(
        purpose="training" if run.training else "sampling",
        model=run.name,
        parameters=run.sizes.total,
        num_gpus=num_gpus,
        sp_size=run.ranks,
        dp_size=num_gpus // run.ranks,
        precision=cfg.precision,
        grad_checkpoint=run.checkpointing,
        micro_batches=run.micro_batches,
        spans_nodes=None if gpus_per_node is None else run.spans_nodes,
        memory_gb=memory_gb,
        gpu=gpu,
        versions=run.platform.describe() if run.platform else None,
        buckets=[run.estimate(bucket, brief=len(buckets) > 1) for bucket in progress(buckets)],
    )


def checkpoint_levels(
    cfg: TrainConfig, num_gpus: int, latents: tuple[int, ...], *, memory_gb: float, device: str
) -> list[int]:
    """What each block keeps under a config's ``grad_checkpoint``; see ``batch_memory``."""
    return batch_memory(cfg, num_gpus, latents, memory_gb=memory_gb, device=device).levels


def batch_memory(
    cfg: TrainConfig,
    num_gpus: int,
    latents: tuple[int, ...],
    *,
    memory_gb: float,
    device: str,
    gpus_per_node: int | None = None,
    options: Options | None = None,
    compiled: bool | None = None,
) -> Memory:
    """Memory of a rank with batches of one shape, and what each block keeps, as configured.

    Args:
        latents: shape ``(B, c, frames, height, width)`` of a micro-batch.
        memory_gb: memory of one device in GB (1e9 bytes) that training may take.
        device: "cuda" or "cpu".
        gpus_per_node: by which switches between nodes are sent in chunks.
        options: of sequence parallelism, with the cost model of a run; None plans for an H100.
        compiled: whether blocks run compiled; None stands for what the config sets, which a run
            does not follow where compiled blocks fail verification.
    """
    run = _Run(cfg, num_gpus, memory_gb, device, None, gpus_per_node)
    if options is not None:
        run.options = options
    if compiled is not None:
        run.compiles = compiled
    return run.memory(latents, run.ranks, brief=True)


class _Run:
    """A config on a number of GPUs; estimates its buckets."""

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
        self.gpu = None if gpu is None else GPUS[gpu]
        self.ranks = cfg.sp_size or num_gpus  # a sampling config without sp_size takes all
        check_sp_size(self.ranks, num_gpus)
        self.spans_nodes = spans_nodes(num_gpus, self.ranks, gpus_per_node or num_gpus)

        rates = cost_model_of(cfg.cost_model, default=GPUS[gpu or "H100"])
        self.options = cfg.parallel_options(rates)
        self.name, self.config = cfg.model_spec.name, cfg.model_spec.config
        self.dtype = DTYPES[cfg.precision]

        self.training = isinstance(cfg, TrainConfig)
        self.checkpointing: bool | int | Literal["auto", "offload"] = False
        self.micro_batches, self.guides = 1, False
        # A plan is that of a machine where Triton is, whatever this one has.
        self.compiles = cfg.compile == "blocks" or (cfg.compile == "auto" and device == "cuda")
        if isinstance(cfg, TrainConfig):
            self.checkpointing = cfg.grad_checkpoint
            replicas = num_gpus // self.ranks
            self.micro_batches = -(-(cfg.micro_batches_per_step or replicas) // replicas)
        else:
            self.guides = build_component(cfg.scheduler, SCHEDULERS).cfg_scale != 1

    @cached_property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.name, self.config)

    def estimate(self, bucket: BatchSpec, *, brief: bool) -> BatchEstimate:
        shape, latents = self.shape(bucket), self.latents(bucket)
        sharing = sharing_of(shape, self.options, self.ranks)
        memory = self.memory(latents, self.ranks, brief=brief)

        compared: dict[str, Traffic] = {}
        advice: list[str] = []
        if not brief:
            for name in strategy_options():
                options = Options(strategy=name)
                if applicable_strategy(shape, options, self.ranks):
                    compared[name] = self.traffic(shape, options, memory.recomputes)
            advice = self._better_balance(bucket, sharing) + self._less_memory(latents, memory)

        return BatchEstimate(
            bucket=bucket,
            tokens={
                "samples": shape.num_samples,
                "frames": shape.frames,
                "patches": shape.patches,
                "total": shape.tokens,
            },
            sharing=sharing,
            tokens_changing_rank=0 if sharing.moves else tokens_changing_rank(shape, self.ranks),
            traffic=self.traffic(shape, self.options, memory.recomputes),
            compared=compared,
            memory=memory,
            time=self.time(latents, memory.levels),
            attention=self.attention(latents),
            advice=advice,
        )

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
        triton = self.cfg.kernels != "torch"
        return attention_kernels(self.config, latents, self.dtype, self.platform, triton=triton)

    def latents(self, bucket: BatchSpec) -> tuple[int, ...]:
        """Shape of the model's input ``[B, c, frames, height, width]``, doubled for guidance."""
        size = planned_latent_size(self.cfg.vae, bucket.num_frames, *bucket.image_size)
        return bucket.batch_size * (2 if self.guides else 1), self.config.in_channels, *size

    def shape(self, bucket: BatchSpec) -> BatchShape:
        return self._shape_of(self.latents(bucket))

    def _shape_of(self, latents: tuple[int, ...]) -> BatchShape:
        num_samples, _, frames, height, width = latents
        return BatchShape.of(self.config, num_samples, (frames, height, width))

    def traffic(self, shape: BatchShape, options: Options, recomputes: bool) -> Traffic:
        sent = traffic(
            shape,
            options,
            self.ranks,
            element_size=self.dtype.itemsize,
            checkpointing=recomputes,
            training=self.training,
        )
        if self.training:
            return sent

        # Sampling gathers the output, which is fp32 or wider.
        volume = math.prod(self.config.patch_size)
        token_bytes = volume * self.config.out_channels * max(4, self.dtype.itemsize)
        strategy = strategy_for(shape, options, self.ranks)
        gathered = output_gather(shape, strategy, self.ranks, token_bytes)
        return replace(sent, forward=[a + b for a, b in zip(sent.forward, gathered, strict=True)])

    def memory(self, latents: tuple[int, ...], ranks: int, *, brief: bool = False) -> Memory:
        """Memory of one of ``ranks`` that share a batch; ``brief``: only as configured."""
        traced = cache(partial(self._traced, latents, ranks))
        if not isinstance(self.cfg, TrainConfig):
            state = Persistent.sampling(self.sizes, self.dtype.itemsize)
            peak = sampling_peak(state, traced(EVERYTHING), self.config.depth)
            return Memory(state, peak, None, peak, [EVERYTHING])

        zero = Zero(
            world=self.num_gpus,
            stage=self.cfg.zero_stage,
            element_size=self.dtype.itemsize,
            accumulates=self.micro_batches > 1,
        )
        state = Persistent.training(self.sizes, zero)

        @cache
        def peak_at(*levels: int) -> MemoryPeak:
            return training_peak(state, self.sizes, zero, mixed(traced, levels))

        levels = self._levels(lambda levels: peak_at(*levels).needed)
        of_inputs = partial(
            offloaded_bytes,
            levels,
            self._shape_of(latents),
            self.options,
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

    def _levels(self, needed: Callable[[Sequence[int]], float]) -> list[int]:
        """What each block keeps; ``needed`` are the bytes that a step takes with such levels."""
        if self.checkpointing != "auto":
            return levels_of(self.checkpointing, self.config.num_blocks)
        memory = DEFAULT_MEMORY if self.memory_gb is None else self.memory_gb * 1e9
        levels = COMPILED_LEVELS if self.compiles else LEVELS
        if self.device == "cpu":
            # What is on the host takes as much of the same memory.
            levels = tuple(level for level in levels if level != OFFLOADED)
        return choose_levels(needed, budget_of(memory), self.config.num_blocks, levels)

    def time(self, latents: tuple[int, ...], levels: Sequence[int]) -> StepTime | None:
        """Predicted for a training step in 16 bits, if a GPU was named."""
        if self.gpu is None or not self.training or self.dtype.itemsize != 2:
            return None
        return predict_step(
            self.name,
            self.config,
            latents,
            gpu=self.gpu,
            options=self._with_chunks(latents, self.ranks),
            ranks=self.ranks,
            world=self.num_gpus,
            dtype=self.dtype,
            levels=levels,
            micro_batches=self.micro_batches,
        )

    def _traced(self, latents: tuple[int, ...], ranks: int, level: int) -> Activations:
        return trace_activations(
            self.name,
            self.config,
            latents,
            options=self._with_chunks(latents, ranks),
            ranks=ranks,
            dtype=self.dtype,
            level=level,
            training=self.training,
            device=self.device,
            # Under "auto" as in eager mode, which takes more and is traced in less time.
            compiled=self.compiles and self.cfg.compile == "blocks" and self.device == "cuda",
        )

    def _with_chunks(self, latents: tuple[int, ...], ranks: int) -> Options:
        """The options, with the number of chunks that "auto" stands for."""
        return with_chunks(
            self.options,
            self._shape_of(latents),
            ranks,
            element_size=self.dtype.itemsize,
            spans_nodes=self.spans_nodes,
        )

    def _better_balance(self, bucket: BatchSpec, sharing: Sharing) -> list[str]:
        """Other sp_sizes and frame counts with which ranks wait less for each other."""
        if sharing.imbalance <= UNEVEN:
            return []

        shape, enough = self.shape(bucket), max(UNEVEN, sharing.imbalance / 2)
        advice = []
        for ranks in range(2, self.num_gpus + 1):
            if self.num_gpus % ranks or ranks == self.ranks:
                continue
            found = sharing_of(shape, self.options, ranks).imbalance
            if found <= enough:
                advice.append(
                    f"sp_size={ranks} has an imbalance of {found:.1%} instead of "
                    f"{sharing.imbalance:.1%}"
                )

        also = " (with model.input_size to match)" if hasattr(self.config, "input_size") else ""
        for step in (-1, 1):
            nearest = self._nearest_even(bucket, step, enough)
            if nearest is not None:
                num_frames, found = nearest
                advice.append(
                    f"num_frames={num_frames} has {found:.1%} instead of "
                    f"{sharing.imbalance:.1%}{also}"
                )

        return advice or [
            f"no other sp_size that divides {self.num_gpus} and no frame count near is more even"
        ]

    def _nearest_even(
        self, bucket: BatchSpec, step: int, enough: float
    ) -> tuple[int, float] | None:
        """The nearest even frame count below (step -1) or above (1), and its imbalance."""
        latent_frames = self.shape(bucket).frames
        for away in range(1, FRAMES_AROUND + 1):
            num_frames = bucket.num_frames + step * away
            if num_frames < 1:
                break
            shape = self.shape(replace(bucket, num_frames=num_frames))
            if shape.frames in (0, latent_frames):
                continue
            found = sharing_of(shape, self.options, self.ranks).imbalance
            if found <= enough:
                return num_frames, found
        return None

    def _less_memory(self, latents: tuple[int, ...], memory: Memory) -> list[str]:
        """What would make the run fit into ``memory_gb``, where it does not."""
        if self.memory_gb is None or memory.configured.needed <= self.memory_gb * 1e9:
            return []

        limit, checkpointed = self.memory_gb * 1e9, memory.checkpointed
        excess = f"{memory.configured.needed / 1e9:.1f} GB do not fit into {self.memory_gb:g} GB"
        if not self.checkpointing and checkpointed and checkpointed.needed <= limit:
            return [f"{excess}: grad_checkpoint=True takes {checkpointed.needed / 1e9:.1f} GB"]

        for ranks in range(self.ranks + 1, self.num_gpus + 1):
            if self.num_gpus % ranks == 0:
                needed = self.memory(latents, ranks).configured.needed
                if needed <= limit:
                    return [f"{excess}: sp_size={ranks} takes {needed / 1e9:.1f} GB"]

        return [
            f"{excess}, nor do more ranks to a batch help: take fewer frames, a smaller "
            "batch_size, or more GPUs"
        ]


def _check_numbers(num_gpus: int, gpus_per_node: int | None, memory_gb: float | None) -> None:
    if num_gpus < 1:
        raise ValueError(
            f"got --gpus {num_gpus}; expected at least 1; pass the number of processes of the run"
        )

    partial_node = gpus_per_node is not None and (
        gpus_per_node < 1 or (num_gpus > gpus_per_node and num_gpus % gpus_per_node != 0)
    )
    if partial_node:
        raise ValueError(
            f"got --gpus-per-node {gpus_per_node} with --gpus {num_gpus}; expected nodes that are "
            "all full; pass a divisor of the number of GPUs"
        )

    if memory_gb is not None and not memory_gb > 0:
        raise ValueError(
            f"got --memory-gb {memory_gb:g}; expected a positive number; pass the memory of one "
            "GPU in GB"
        )
