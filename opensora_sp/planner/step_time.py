"""Time of a training step on a GPU, predicted from what its operators compute and move.

A kernel takes as long as its FLOPs or its bytes at the rates of ``CostModel``, whichever is longer.
Kernels run one after the other, or as fast as the host launches them. Nothing here was measured on
the GPU itself: compare with ``docs/benchmarks.md``, and expect real steps to be slower by a fifth.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opensora_sp.config.sections import Lora
from opensora_sp.models.kernels import Kernels, using_kernels
from opensora_sp.models.recompute import EVERYTHING
from opensora_sp.parallel import Options, SequenceMesh, parallelize
from opensora_sp.parallel.batch_shape import BatchShape
from opensora_sp.parallel.cost_model import CostModel, Link
from opensora_sp.parallel.strategies import strategy_for

from .checkpointing import offloaded_bytes
from .flops import ModelFlops
from .operators import OperatorCounter, Work
from .trace import meta_model, run_step, small_meta_model
from .traffic import traffic

EXCHANGES, OPTIMIZER, ZERO = "all-to-all", "optimizer step", "ZeRO's collectives"

# AdamW reads a gradient in 16 bits, reads and writes master weight, two moments and EMA in fp32,
# and writes the weight in 16 bits; the norm reads the gradient once before.
OPTIMIZER_BYTES = 2 + 8 + 8 + 8 + 8 + 2 + 2
OPTIMIZER_FLOPS = 20
FP32 = 4


@dataclass(frozen=True)
class StepTime:
    """A predicted optimizer step of the busiest rank.

    Attributes:
        work: FLOPs, bytes, operators and seconds by kind of operator.
        host_copies: of blocks' inputs to the host and back, beside all other work.
        seconds: of the whole step.
        mfu: model FLOPs utilisation: FLOPs of forward and backward, without recomputation, per
            second, as a share of the GPU's dense bf16 peak.
    """

    work: dict[str, Work]
    seconds: float
    mfu: float
    host_copies: Work = field(default_factory=Work)

    @property
    def is_launch_bound(self) -> bool:
        """Whether the host launches operators more slowly than the GPU runs them."""
        return self.seconds > sum(one.seconds for one in self.work.values())


def predict_step(
    name: str,
    config: Any,
    latents: tuple[int, ...],
    *,
    gpu: CostModel,
    options: Options,
    ranks: int,
    world: int,
    world_spans_nodes: bool = False,
    dtype: torch.dtype,
    levels: Sequence[int] = (EVERYTHING,),
    micro_batches: int = 1,
    accumulates_locally: bool = False,
    kernels: Kernels = "torch",
    lora: Lora | None = None,
    num_frames: int | None = None,
) -> StepTime:
    """Predict an optimizer step of the busiest rank, in eager mode.

    Args:
        name, config: a model's registered name and its whole configuration.
        latents: ``(B, c, frames, height, width)`` of a micro-batch.
        ranks: of a sequence-parallel group.
        world: all ranks, over which ZeRO shards the optimizer.
        world_spans_nodes: whether they lie on several nodes.
        levels: what the blocks keep under gradient checkpointing; one for all, or each block's.
        accumulates_locally: gradients are reduced once, in fp32, not in each micro-batch.
        kernels: as in ``set_kernels``: "triton" takes all of them.
        lora: adapters that are trained alone.
        num_frames: of the video, for models with an input of each; by default those of the latents.

    Raises:
        ValueError: if ``dtype`` is not of 16 bits, for which the rates of GPUs are.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"got {dtype}; expected torch.bfloat16 or torch.float16, for which the speeds of GPUs "
            "are known; set precision"
        )

    shape = BatchShape.of(config, latents[0], latents[2:])  # type: ignore[arg-type]
    passes: dict[str, Work] = {}
    for level, count in Counter(levels).items():
        with using_kernels(kernels):
            alike = _passes(
                name, config, latents, gpu, options, ranks, dtype, level, lora, num_frames
            )
        for kind, one in alike.items():
            passes[kind] = passes.get(kind, Work()).plus(one, count / len(levels))
    recomputes = min(levels) < EVERYTHING
    passes[EXCHANGES] = _exchanges(shape, options, gpu, ranks, dtype, recomputes)
    work = {kind: Work().plus(one, micro_batches) for kind, one in passes.items()}

    model = meta_model(name, config, dtype, lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    work[OPTIMIZER] = _optimizer(trained / world, gpu)
    weights = trained * dtype.itemsize
    gradients = trained * FP32 if accumulates_locally else weights * micro_batches
    link = gpu.link(spans_nodes=world_spans_nodes)
    work[ZERO] = _zero(gradients + weights, link, world)

    offloaded = offloaded_bytes(levels, shape, options, ranks, dtype.itemsize) * micro_batches
    copies = Work(bytes=2.0 * offloaded, seconds=2.0 * offloaded / gpu.to_host)

    launches = sum(one.launches for one in work.values())
    seconds = max(sum(one.seconds for one in work.values()), launches * gpu.launch)
    # Copies to the host run beside forward, a quarter of the time where all is recomputed.
    seconds += max(0.0, copies.seconds / 2 - seconds / 4)
    text = float(latents[0] * config.model_max_length)
    useful = ModelFlops.of(model).step(latents, text) * micro_batches / ranks
    return StepTime(work, seconds, mfu=useful / seconds / gpu.peak, host_copies=copies)


def _passes(
    name: str,
    config: Any,
    latents: tuple[int, ...],
    gpu: CostModel,
    options: Options,
    ranks: int,
    dtype: torch.dtype,
    level: int,
    lora: Lora | None,
    num_frames: int | None,
) -> dict[str, Work]:
    """Forward and backward of one micro-batch: each further pair adds as much as the second."""
    counted = []
    # The first trace also makes tables that all later ones of this process share.
    for depth in (2, 1, 2):
        model = small_meta_model(name, config, depth, dtype, lora)
        model.set_grad_checkpoint([level] * len(model.transformer_blocks))
        mesh = SequenceMesh.imagined(ranks, ranks - 1)
        parallelize(model, mesh, dataclasses.replace(options, verify=False))

        counter = OperatorCounter(gpu)
        with counter.watching(model), counter:
            for _ in run_step(
                model, latents, ranks=ranks, training=True, device="meta", num_frames=num_frames
            ):
                pass
        counted.append(counter.work)

    _, one, two = counted
    work = {}
    for kind, of_two in two.items():
        pair = of_two.plus(one.get(kind, Work()), -1)
        work[kind] = of_two.plus(pair, config.depth - 2)
    return work


def _exchanges(
    shape: BatchShape,
    options: Options,
    gpu: CostModel,
    ranks: int,
    dtype: torch.dtype,
    checkpointing: bool,
) -> Work:
    """The links: what the busiest rank sends, and a latency for each collective."""
    if ranks == 1:
        return Work()
    sent = traffic(
        shape,
        options,
        ranks,
        element_size=dtype.itemsize,
        checkpointing=checkpointing,
        training=True,
    )
    strategy = strategy_for(shape, options, ranks)
    exchanges = strategy.exchanges(shape, options, dtype.itemsize)
    calls = float(sum(getattr(exchange, "count", 1) for exchange in exchanges))
    calls *= 3 if any(sent.recompute) else 2
    seconds = gpu.link(spans_nodes=options.spans_nodes).seconds(sent.busiest, calls)
    return Work(bytes=float(sent.busiest), operators=calls, seconds=seconds, launches=calls)


def _optimizer(parameters: float, gpu: CostModel) -> Work:
    moved = parameters * OPTIMIZER_BYTES
    return Work(parameters * OPTIMIZER_FLOPS, moved, seconds=moved / gpu.memory_bandwidth)


def _zero(total_bytes: float, link: Link, world: int) -> Work:
    """Gradients are reduced and weights are gathered, all of these bytes over the links."""
    sent = total_bytes * (world - 1) / world
    return Work(bytes=sent, seconds=sent / link.bandwidth)
