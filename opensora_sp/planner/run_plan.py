"""The plan of a config: strategy, communication, memory and advice for each bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.config.schedule import describe_schedule
from opensora_sp.parallel import Options
from opensora_sp.parallel.cost_model import GPUS, CostModel
from opensora_sp.parallel.strategies import applicable_strategy, strategy_options

from .advice import better_balance, less_memory
from .attention_kernels import Kernels
from .batches import BatchSpec, batches_by_name, buckets_of
from .communicators import Communicators, communicators_of
from .least_ranks import ranks_of_bucket
from .run_estimator import DEFAULT_MEMORY, Memory, RunEstimator
from .sampling_memory import SamplingMemory
from .sharing import Sharing, sharing_of
from .step_time import StepTime
from .traffic import Traffic, tokens_changing_rank


@dataclass(frozen=True)
class BatchEstimate:
    """The estimate of one bucket on ``ranks`` that share its batches.

    A step has ``micro_batches`` of a rank, if all of them are of this bucket. ``traffic`` is per
    rank and micro-batch (sampling: per call of the model); ``compared`` is by strategy.
    ``tokens_changing_rank`` counts those that one switch between the layouts moves. ``time`` is
    predicted for training in 16 bits on a GPU that was named, ``attention`` are the kernels on that
    GPU. ``sampling`` is the memory with the encoders. Among several buckets there is neither a
    comparison nor advice.
    """

    bucket: BatchSpec
    ranks: int
    micro_batches: int
    tokens: dict[str, int]
    sharing: Sharing
    tokens_changing_rank: int
    traffic: Traffic
    compared: dict[str, Traffic]
    memory: Memory
    time: StepTime | None
    attention: Kernels | None
    advice: list[str]
    sampling: SamplingMemory | None = None


class BatchOnRanks(NamedTuple):
    """A batch, and the number of ranks that share it."""

    batch: BatchSpec
    ranks: int


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    ``adapters`` are the parameters of LoRA adapters, which are then trained alone.
    ``spans_nodes`` is None for unknown nodes; ``kernels`` describes those of all estimates;
    ``versions`` are those that the kernels on ``gpu`` depend on, as installed here. ``schedule``
    describes optimizer, learning rate and EMA weights; empty for sampling.
    """

    purpose: str
    model: str
    parameters: int
    adapters: int | None
    num_gpus: int
    sp_size: int
    dp_size: int
    communicators: Communicators | None  # of groups of several sizes
    precision: str
    grad_checkpoint: bool | int | str
    kernels: str
    spans_nodes: bool | None
    memory_gb: float | None
    gpu: str | None
    versions: str | None
    schedule: list[str]
    buckets: list[BatchEstimate]

    @property
    def memory_of_step(self) -> float:
        """Bytes of a GPU beside communicators; infinity where its memory is not known."""
        if self.memory_gb is None:
            return math.inf
        taken = self.communicators.beside_largest if self.communicators else 0.0
        return self.memory_gb * 1e9 - taken

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values, with the means and sums that the table shows."""
        values = asdict(self)
        for bucket, shown in zip(self.buckets, values["buckets"], strict=True):
            shown["memory"]["kept"]["total"] = bucket.memory.kept.total
            shown["memory"]["configured"]["needed"] = bucket.memory.configured.needed

            if bucket.time is not None:
                shown["time"]["is_launch_bound"] = bucket.time.is_launch_bound

            if bucket.sampling is not None:
                shown["sampling"]["peak"] = bucket.sampling.peak

            shown["traffic"].update(mean=bucket.traffic.mean, busiest=bucket.traffic.busiest)
            for name, sent in bucket.compared.items():
                shown["compared"][name].update(mean=sent.mean, busiest=sent.busiest)
        return values


def plan(
    cfg: TrainConfig | InferenceConfig,
    num_gpus: int,
    *,
    gpus_per_node: int | None = None,
    memory_gb: float | None = None,
    gpu: str | None = None,
    device: str = "cuda",
    degrees: Mapping[str, Sequence[int]] | None = None,
    progress: Callable[[list[BatchOnRanks]], Iterable[BatchOnRanks]] = iter,
) -> Plan:
    """Plan a config's run on ``num_gpus`` processes. Needs no process group, no GPU and no weights.

    Args:
        gpus_per_node: to determine whether a sequence-parallel group spans nodes.
        memory_gb: memory of one GPU in GB (1e9 bytes), to report what does not fit.
        gpu: a name in ``GPUS``, to predict the time of a step, and for its memory unless
            ``memory_gb`` is passed.
        device: "cuda" or "cpu", on which torch's AdamW and its allocator work differently.
        degrees: by bucket, the numbers of ranks that share its batches, each of which is estimated.
            A bucket that is not in has the config's, or with ``sp_size="auto"`` the fewest that its
            batches fit on.
        progress: iterates over the buckets and may show how far it is.

    Raises:
        ValueError: if the numbers do not fit each other or the config.
    """
    check_numbers(num_gpus, gpus_per_node, memory_gb)
    if gpu is not None:
        of_gpu = gpu_of(gpu).memory / 1e9
        memory_gb = of_gpu if memory_gb is None else memory_gb
    run = RunEstimator(cfg, num_gpus, memory_gb, device, gpu, gpus_per_node)
    kernels = run.plan_kernels()
    nested = communicators_of(cfg.sp_size, num_gpus, run.gpus_per_node)
    run.reserved = 0.0 if nested is None else nested.beside_largest
    buckets = _buckets_on_ranks(run, degrees or {})
    return Plan(
        purpose="training" if run.training else "sampling",
        model=run.name,
        parameters=run.sizes.total,
        adapters=None if run.lora is None else sum(run.sizes.trainable),
        num_gpus=num_gpus,
        sp_size=run.ranks,
        dp_size=num_gpus // run.ranks,
        communicators=nested,
        precision=cfg.precision,
        grad_checkpoint=run.checkpointing,
        kernels=kernels,
        spans_nodes=None if gpus_per_node is None else run.spans_nodes(run.ranks),
        memory_gb=memory_gb,
        gpu=gpu,
        versions=run.platform.describe() if run.platform else None,
        schedule=describe_schedule(cfg) if isinstance(cfg, TrainConfig) else [],
        buckets=[_estimate(run, *one, brief=len(buckets) > 1) for one in progress(buckets)],
    )


def _buckets_on_ranks(
    run: RunEstimator, degrees: Mapping[str, Sequence[int]]
) -> list[BatchOnRanks]:
    """The batches of each bucket, with each number of ranks that share them."""
    buckets_of(run.cfg)  # refuses those whose size is chosen later
    memory = (run.memory_gb or DEFAULT_MEMORY / 1e9) * 1e9 - run.reserved
    found = []
    for name, batch in batches_by_name(run.cfg).items():
        ranks = degrees.get(name) or [ranks_of_bucket(name, batch, run, memory)]
        found += [BatchOnRanks(batch, number) for number in ranks]
    return found


def gpu_of(name: str) -> CostModel:
    """The rates of a GPU by its name.

    Raises:
        ValueError: if it is none of ``GPUS``.
    """
    if name not in GPUS:
        raise ValueError(f"got --gpu {name!r}; expected one of {list(GPUS)}; correct the name")
    return GPUS[name]


def batch_memory(
    cfg: TrainConfig,
    num_gpus: int,
    latents: tuple[int, ...],
    *,
    memory_gb: float,
    device: str,
) -> Memory:
    """Memory of a rank with batches of one shape, and what each block keeps, as configured.

    Args:
        latents: shape ``(B, c, frames, height, width)`` of a micro-batch.
        memory_gb: memory of one device in GB (1e9 bytes) that training may take.
        device: "cuda" or "cpu".
    """
    run = RunEstimator(cfg, num_gpus, memory_gb, device, None)
    run.plan_kernels()
    return run.memory(latents, run.ranks, brief=True)


def _estimate(run: RunEstimator, bucket: BatchSpec, ranks: int, *, brief: bool) -> BatchEstimate:
    shape, latents = run.shape(bucket), run.latents(bucket)
    on_ranks = run.options_on(ranks)
    sharing = sharing_of(shape, on_ranks, ranks)
    switches = shape.alternates and not sharing.moves
    memory = run.memory(latents, ranks, brief=brief)

    compared: dict[str, Traffic] = {}
    advice: list[str] = []
    if not brief:
        for name in strategy_options():
            options = Options(strategy=name, spans_nodes=on_ranks.spans_nodes)
            if applicable_strategy(shape, options, ranks):
                compared[name] = run.traffic(shape, options, ranks, recomputes=memory.recomputes)
        advice = better_balance(run, bucket, sharing, ranks)
        advice += less_memory(run, latents, memory, ranks)

    return BatchEstimate(
        bucket=bucket,
        ranks=ranks,
        micro_batches=run.micro_batches_on(ranks),
        tokens={
            "samples": shape.num_samples,
            "frames": shape.frames,
            "patches": shape.patches,
            "total": shape.tokens,
        },
        sharing=sharing,
        tokens_changing_rank=tokens_changing_rank(shape, ranks) if switches else 0,
        traffic=run.traffic(shape, on_ranks, ranks, recomputes=memory.recomputes),
        compared=compared,
        memory=memory,
        time=run.time(latents, memory.levels, ranks),
        attention=run.attention(latents),
        advice=advice,
        sampling=None if run.training else run.sampling_memory(bucket, memory)[1],
    )


def check_numbers(num_gpus: int, gpus_per_node: int | None, memory_gb: float | None) -> None:
    """Raise ValueError unless there are processes, on nodes that are all full, with some memory."""
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
