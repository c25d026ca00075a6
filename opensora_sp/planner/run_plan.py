"""The plan of a config: strategy, communication, memory and seconds of each bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from opensora_sp.common.importing import is_installed
from opensora_sp.config import InferenceConfig, TrainConfig
from opensora_sp.data.buckets import CHOSEN_AT_START, BatchSpec
from opensora_sp.diffusion.cached_steps import SamplingStep
from opensora_sp.models.recompute import EVERYTHING
from opensora_sp.parallel.cost_model import CostModel
from opensora_sp.parallel.strategies import strategy_for
from opensora_sp.runtime.cost_models import GPUS, cost_model_of

from .bucket_levels import ranks_of_bucket
from .run_estimator import Estimate, RunEstimator
from .sampling_memory import SamplingMemory, placed


@dataclass(frozen=True)
class StepsEstimate:
    """All sampling steps of a batch on the ranks that share it.

    ``seconds`` are of the busiest rank, where steps that reuse the blocks' residual count as none.
    """

    steps: list[SamplingStep]
    seconds: float


@dataclass(frozen=True)
class BatchEstimate(Estimate):
    """The estimate of one bucket on ``ranks`` that share its batches.

    ``shape`` are the samples, frames, patches of a frame and tokens of a batch; ``strategy`` is
    how ranks share it, ``reason`` why. ``fits`` is whether it needs no more than the run's memory,
    ``sampling`` the memory with the encoders, ``steps`` all steps of sampling.
    """

    bucket: BatchSpec
    ranks: int
    shape: dict[str, int]
    strategy: str
    reason: str
    fits: bool
    sampling: SamplingMemory | None = None
    steps: StepsEstimate | None = None


@dataclass(frozen=True)
class Plan:
    """The estimates of all buckets, and the estimator of the run."""

    run: RunEstimator
    buckets: list[BatchEstimate]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        run = self.run
        return dict(
            purpose="training" if run.training else "sampling",
            model=run.name,
            parameters=run.sizes.total,
            adapters=run.adapters,
            num_gpus=run.num_gpus,
            sp_size=run.ranks,
            dp_size=run.num_gpus // run.ranks,
            communicators=run.communicators,
            precision=run.cfg.precision,
            grad_checkpoint=run.checkpointing,
            kernels=run.kernels_in_words,
            rates=run.options.cost_model.name,
            spans_nodes=run.spans_nodes(run.ranks) if run.knows_nodes else None,
            memory_gb=run.device_memory and run.device_memory / 1e9,
            buckets=[asdict(bucket) for bucket in self.buckets],
        )


def estimator_of(
    cfg: TrainConfig | InferenceConfig,
    num_gpus: int,
    *,
    gpus_per_node: int | None = None,
    memory_gb: float | None = None,
    gpu: str | None = None,
    device: str = "cuda",
) -> RunEstimator:
    """The estimator of a config's run on ``num_gpus`` processes.

    Args:
        gpus_per_node: to determine whether a sequence-parallel group spans nodes.
        memory_gb: memory of one GPU in GB (1e9 bytes), to report what does not fit.
        gpu: a name in ``GPUS``, for its memory unless ``memory_gb`` is passed, and for its rates
            unless the config has a cost model.
        device: "cuda" or "cpu", on which torch's AdamW and its allocator work differently.

    Raises:
        ValueError: if the numbers do not fit each other or the config.
    """
    check_numbers(gpus=num_gpus, gpus_per_node=gpus_per_node, memory_gb=memory_gb)
    rates = rates_of(cfg, gpu)
    memory = None if memory_gb is None else memory_gb * 1e9
    if memory is None and gpu is not None:
        memory = GPUS[gpu].memory

    run = RunEstimator(
        cfg, num_gpus, memory, device=device, rates=rates, gpus_per_node=gpus_per_node
    )
    # As on a GPU that has verified them all.
    if cfg.kernels != "torch" and device != "cpu" and is_installed("triton"):
        run.kernels = "triton"
    return run


def plan(cfg: TrainConfig | InferenceConfig, num_gpus: int, **numbers: Any) -> Plan:
    """Plan a config's run on ``num_gpus`` processes. Needs no process group, no GPU and no weights.

    Args:
        numbers: see ``estimator_of``.
    """
    run = estimator_of(cfg, num_gpus, **numbers)
    return Plan(run, list(bucket_estimates(run)))


def bucket_estimates(run: RunEstimator) -> Iterator[BatchEstimate]:
    """Estimate one bucket after the other, which takes about half a second each.

    Ranks that share a batch are the config's, or with ``sp_size="auto"`` the fewest that it fits
    on.

    Raises:
        ValueError: if a batch size is chosen when the run starts.
    """
    for name, batch in run.cfg.batches().items():
        if batch.batch_size == CHOSEN_AT_START:
            raise ValueError(
                f"got bucket_config with batch sizes that a run chooses at its start ({name}); "
                "expected numbers; pass --fit with the memory of a GPU, such as --fit 80GB"
            )
        yield _estimate(run, batch, ranks_of_bucket(name, batch, run))


def _estimate(run: RunEstimator, bucket: BatchSpec, ranks: int) -> BatchEstimate:
    latents = run.latents(bucket)
    shape, options = run.shape_of(latents), run.options_on(ranks)
    strategy, estimate = strategy_for(shape, options, ranks), run.estimate(latents, ranks)
    return BatchEstimate(
        **vars(estimate),
        bucket=bucket,
        ranks=ranks,
        shape={
            "samples": shape.num_samples,
            "frames": shape.frames,
            "patches": shape.patches,
            "tokens": shape.tokens,
        },
        strategy=strategy.label,
        reason=strategy.reason(shape, options, ranks),
        fits=estimate.memory.peak.needed <= run.memory,
        sampling=None if run.training else placed(run, bucket, estimate.memory)[1],
        steps=None if run.training else _all_steps(run, bucket, ranks),
    )


def _all_steps(run: RunEstimator, bucket: BatchSpec, ranks: int) -> StepsEstimate:
    steps = run.steps(bucket)
    shapes = [run.latents(bucket, step) for step in steps if step.computed]
    seconds = {shape: run.seconds(shape, ranks, [EVERYTHING]) for shape in set(shapes)}
    return StepsEstimate(steps, sum(seconds[shape] for shape in shapes))


def rates_of(cfg: TrainConfig | InferenceConfig, gpu: str | None) -> CostModel:
    """The rates of a config that has a cost model, else of a GPU by its name, or of an H100.

    Raises:
        ValueError: if the name is none of ``GPUS``.
    """
    if gpu is not None and gpu not in GPUS:
        raise ValueError(
            f"got --gpu {gpu!r}; expected one of {', '.join(GPUS)}; correct the name, or pass the "
            "memory of another GPU with --memory-gb"
        )
    return cost_model_of(cfg.cost_model, default=GPUS[gpu or "H100"])


def check_numbers(**numbers: float | None) -> None:
    """Raise ValueError unless those that are passed, by their option, are positive."""
    for name, number in numbers.items():
        if number is not None and not number > 0:
            option = f"--{name.replace('_', '-')} {number:g}"
            raise ValueError(f"got {option}; expected a positive number; correct it")
