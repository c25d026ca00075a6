"""The plan of a config: for each bucket how ranks share it, what they send, what it takes, what would be better."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from opensora_sp.config import InferenceConfig, TrainConfig, build_component
from opensora_sp.config.schema import SCHEDULERS
from opensora_sp.data import Buckets
from opensora_sp.dtypes import DTYPES
from opensora_sp.encoders import planned_latent_size
from opensora_sp.parallel import Options, check_sp_size

from .memory import Kept, ModelSizes, Peak, Zero, sampling_peak, training_peak
from .sharing import Shape, Sharing, options_of, share
from .trace import Activations, trace_activations
from .traffic import Traffic, output_gather, tokens_changing_rank, traffic

COMPARED = ("switch", "ulysses", "split_gather")
UNEVEN = 0.03  # imbalance above which a change is looked for
FRAMES_AROUND = 8  # frame counts looked at below and above


@dataclass(frozen=True)
class Bucket:
    """Batches of one shape: ``batch_size`` clips of ``num_frames`` frames of ``image_size`` pixels."""

    batch_size: int
    num_frames: int
    image_size: tuple[int, int]


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, the busiest. Without checkpointing, with it, and the one of these that the config asks for.
    Among several buckets only that one is looked at."""

    kept: Kept
    plain: Peak | None
    checkpointed: Peak | None
    configured: Peak


@dataclass(frozen=True)
class BucketPlan:
    """``traffic`` is per rank and micro-batch (sampling: per call of the model); ``compared`` is by strategy.
    ``tokens_changing_rank`` counts those that one switch between the layouts moves. Among several buckets there is
    neither a comparison nor advice."""

    bucket: Bucket
    tokens: dict[str, int]
    sharing: Sharing
    tokens_changing_rank: int
    traffic: Traffic
    compared: dict[str, Traffic]
    memory: Memory
    advice: list[str]


@dataclass(frozen=True)
class Plan:
    """``micro_batches`` of one rank in one optimizer step; ``spans_nodes`` is None where nodes are not known."""

    purpose: str
    model: str
    parameters: int
    num_gpus: int
    sp_size: int
    dp_size: int
    precision: str
    grad_checkpoint: bool
    micro_batches: int
    spans_nodes: bool | None
    memory_gb: float | None
    buckets: list[BucketPlan]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values, with the means and sums that the table shows."""
        values = asdict(self)
        for bucket, told in zip(self.buckets, values["buckets"], strict=True):
            told["memory"]["kept"]["total"] = bucket.memory.kept.total
            told["memory"]["configured"]["needed"] = bucket.memory.configured.needed
            found = {"traffic": bucket.traffic, **bucket.compared}
            places = {"traffic": told["traffic"], **told["compared"]}
            for name, sent in found.items():
                places[name].update(mean=sent.mean, busiest=sent.busiest)
        return values


def buckets_of(cfg: TrainConfig | InferenceConfig) -> list[Bucket]:
    """The shapes of batches that a config makes; of each bucket that at 16:9."""
    if isinstance(cfg, TrainConfig) and cfg.bucket_config is not None:
        kept = [entry for entry in Buckets.of(cfg.bucket_config).entries if entry.batch_size]
        shapes = [(entry, entry.shape_at(9 / 16)) for entry in kept]
        return [
            Bucket(entry.batch_size, shape.num_frames, (shape.height, shape.width))
            for entry, shape in shapes
        ]
    return [Bucket(cfg.batch_size, cfg.num_frames, cfg.size)]


def plan(
    cfg: TrainConfig | InferenceConfig,
    num_gpus: int,
    *,
    gpus_per_node: int | None = None,
    memory_gb: float | None = None,
    device: str = "cuda",
    progress: Callable[[list[Bucket]], Iterable[Bucket]] = iter,
) -> Plan:
    """Plan a config's run on ``num_gpus`` processes. Needs no process group, no GPU and no weights.

    Args:
        gpus_per_node: to say whether a sequence-parallel group spans nodes.
        memory_gb: memory of one GPU in GB (1e9 bytes), to say what does not fit.
        device: "cuda" or "cpu", on which torch's AdamW and its allocator work differently.
        progress: goes through the buckets in the place of a loop, to show how far that is.

    Raises:
        ValueError: if the numbers do not fit each other or the config.
    """
    _check_numbers(num_gpus, gpus_per_node, memory_gb)
    run, buckets = _Run(cfg, num_gpus, memory_gb, device), buckets_of(cfg)
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
        spans_nodes=None
        if gpus_per_node is None
        else spans_nodes(num_gpus, run.ranks, gpus_per_node),
        memory_gb=memory_gb,
        buckets=[run.plan(bucket, brief=len(buckets) > 1) for bucket in progress(buckets)],
    )


def spans_nodes(num_gpus: int, sp_size: int, gpus_per_node: int) -> bool:
    """Whether any group of ``sp_size`` neighbouring ranks lies on more than one node."""
    firsts = range(0, num_gpus, sp_size)
    return any(first // gpus_per_node != (first + sp_size - 1) // gpus_per_node for first in firsts)


class _Run:
    """A config on a number of GPUs; plans its buckets."""

    def __init__(
        self,
        cfg: TrainConfig | InferenceConfig,
        num_gpus: int,
        memory_gb: float | None,
        device: str,
    ) -> None:
        self.cfg, self.num_gpus, self.memory_gb, self.device = cfg, num_gpus, memory_gb, device
        self.ranks = cfg.sp_size or num_gpus  # a sampling config without sp_size takes all
        check_sp_size(self.ranks, num_gpus)
        self.options = options_of(getattr(cfg, "sequence_parallel", None))
        spec = cfg.model_spec
        self.name, self.config = spec.name, spec.config
        self.dtype = DTYPES[cfg.precision]
        self.training = isinstance(cfg, TrainConfig)
        self.guides = (
            not self.training and build_component(cfg.scheduler, SCHEDULERS).cfg_scale != 1
        )
        self.checkpointing, self.micro_batches = False, 1
        if isinstance(cfg, TrainConfig):
            self.checkpointing = cfg.grad_checkpoint
            replicas = num_gpus // self.ranks
            self.micro_batches = -(-(cfg.micro_batches_per_step or replicas) // replicas)

    @cached_property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.name, self.config)

    def plan(self, bucket: Bucket, *, brief: bool) -> BucketPlan:
        shape, latents = self.shape(bucket), self.latents(bucket)
        sharing = share(shape, self.options, self.ranks)
        switches = sharing.mode in ("SwitchRows", "BranchSwitch")
        others = {} if brief else {strategy: Options(strategy=strategy) for strategy in COMPARED}
        memory = self.memory(latents, self.ranks, brief=brief)
        advice = (
            []
            if brief
            else [*self._better_balance(bucket, sharing), *self._less_memory(latents, memory)]
        )
        return BucketPlan(
            bucket=bucket,
            tokens={
                "samples": shape.num_samples,
                "frames": shape.frames,
                "patches": shape.patches,
                "total": shape.tokens,
            },
            sharing=sharing,
            tokens_changing_rank=tokens_changing_rank(shape, self.ranks) if switches else 0,
            traffic=self.traffic(shape, self.options),
            compared={name: self.traffic(shape, options) for name, options in others.items()},
            memory=memory,
            advice=advice,
        )

    def latents(self, bucket: Bucket) -> tuple[int, ...]:
        """What the model is called with, ``[B, c, frames, height, width]``; guidance doubles a batch of samples."""
        size = planned_latent_size(self.cfg.vae, bucket.num_frames, *bucket.image_size)
        return bucket.batch_size * (2 if self.guides else 1), self.config.in_channels, *size

    def shape(self, bucket: Bucket) -> Shape:
        num_samples, _, frames, height, width = self.latents(bucket)
        return Shape.of(self.config, num_samples, (frames, height, width))

    def traffic(self, shape: Shape, options: Options) -> Traffic:
        found = traffic(
            shape.mode(options, self.ranks),
            shape,
            options,
            self.ranks,
            element_size=self.dtype.itemsize,
            checkpointing=self.checkpointing,
            training=self.training,
        )
        if self.training:
            return found
        volume = self.config.patch_size[0] * self.config.patch_size[1] * self.config.patch_size[2]
        token_bytes = (
            volume * self.config.out_channels * max(4, self.dtype.itemsize)
        )  # outputs are fp32 or wider
        gathered = output_gather(shape, shape.mode(options, self.ranks), self.ranks, token_bytes)
        return replace(found, forward=[a + b for a, b in zip(found.forward, gathered, strict=True)])

    def memory(self, latents: tuple[int, ...], ranks: int, *, brief: bool = False) -> Memory:
        """Of one of ``ranks`` that share a batch, in this run's world; ``brief``: only as configured."""

        def traced(checkpointing: bool) -> Activations:
            return trace_activations(
                self.name,
                self.config,
                latents,
                options=self.options,
                ranks=ranks,
                dtype=self.dtype,
                checkpointing=checkpointing,
                training=self.training,
                device=self.device,
                compiled=self.device == "cuda" and getattr(self.cfg, "compile", None) == "blocks",
            )

        if not self.training:
            kept = Kept.sampling(self.sizes, self.dtype.itemsize)
            peak = sampling_peak(kept, traced(False), self.config.depth)
            return Memory(kept, peak, None, peak)
        fused = self.cfg.optimizer.type == "HybridAdam"  # type: ignore[union-attr]
        zero = Zero(
            world=self.num_gpus,
            stage=self.cfg.zero_stage,  # type: ignore[union-attr]
            element_size=self.dtype.itemsize,
            accumulates=self.micro_batches > 1,
            fused=fused,
            foreach=self.device == "cuda",
        )
        kept = Kept.training(self.sizes, zero)
        peaks = {
            on: training_peak(kept, self.sizes, zero, traced(on))
            for on in (False, True)
            if not brief or on == self.checkpointing
        }
        return Memory(kept, peaks.get(False), peaks.get(True), peaks[self.checkpointing])

    def _better_balance(self, bucket: Bucket, sharing: Sharing) -> list[str]:
        """Other sp_sizes and frame counts with which ranks wait less for each other."""
        if sharing.imbalance <= UNEVEN:
            return []
        shape, enough = self.shape(bucket), max(UNEVEN, sharing.imbalance / 2)
        advice = []
        for ranks in (
            n for n in range(2, self.num_gpus + 1) if self.num_gpus % n == 0 and n != self.ranks
        ):
            found = share(shape, self.options, ranks).imbalance
            if found <= enough:
                advice.append(
                    f"sp_size={ranks} has an imbalance of {found:.1%} instead of {sharing.imbalance:.1%}"
                )
        for step in (-1, 1):
            for num_frames in range(
                bucket.num_frames + step, bucket.num_frames + step * (FRAMES_AROUND + 1), step
            ):
                other = (
                    self.shape(replace(bucket, num_frames=num_frames)) if num_frames > 0 else shape
                )
                if other.frames in (0, shape.frames):
                    continue
                found = share(other, self.options, self.ranks).imbalance
                if found <= enough:
                    also = (
                        " (with model.input_size to match)"
                        if hasattr(self.config, "input_size")
                        else ""
                    )
                    advice.append(
                        f"num_frames={num_frames} has {found:.1%} instead of {sharing.imbalance:.1%}{also}"
                    )
                    break
        return advice or [
            f"no other sp_size that divides {self.num_gpus} and no frame count near is more even"
        ]

    def _less_memory(self, latents: tuple[int, ...], memory: Memory) -> list[str]:
        if self.memory_gb is None or memory.configured.needed <= self.memory_gb * 1e9:
            return []
        told = f"{memory.configured.needed / 1e9:.1f} GB do not fit into {self.memory_gb:g} GB"
        if (
            not self.checkpointing
            and memory.checkpointed
            and memory.checkpointed.needed <= self.memory_gb * 1e9
        ):
            return [f"{told}: grad_checkpoint=True takes {memory.checkpointed.needed / 1e9:.1f} GB"]
        for ranks in (
            n for n in range(self.ranks + 1, self.num_gpus + 1) if self.num_gpus % n == 0
        ):
            total = self.memory(latents, ranks).configured.needed
            if total <= self.memory_gb * 1e9:
                return [f"{told}: sp_size={ranks} takes {total / 1e9:.1f} GB"]
        return [
            f"{told}, nor do more ranks to a batch help: take fewer frames, a smaller batch_size, or more GPUs"
        ]


def _check_numbers(num_gpus: int, gpus_per_node: int | None, memory_gb: float | None) -> None:
    if num_gpus < 1:
        raise ValueError(
            f"got --gpus {num_gpus}; expected at least 1; pass the number of processes of the run"
        )
    if gpus_per_node is not None and (
        gpus_per_node < 1 or (num_gpus > gpus_per_node and num_gpus % gpus_per_node)
    ):
        raise ValueError(
            f"got --gpus-per-node {gpus_per_node} with --gpus {num_gpus}; expected nodes that are all full; pass a "
            "divisor of the number of GPUs"
        )
    if memory_gb is not None and not memory_gb > 0:
        raise ValueError(
            f"got --memory-gb {memory_gb:g}; expected a positive number; pass the memory of one GPU in GB"
        )
