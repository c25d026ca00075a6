"""Metrics of the intervals between two lines of the log."""

from __future__ import annotations

import logging
import resource
import statistics
import sys
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_sp.common.tensors import to_device
from opensora_sp.config import TrainConfig
from opensora_sp.data.loader import StepLoader
from opensora_sp.data.sampler import MicroBatch
from opensora_sp.features.batch import Batch
from opensora_sp.features.build import Work
from opensora_sp.features.corrupt_samples import CorruptSamples
from opensora_sp.models.base import ConditionedModel
from opensora_sp.parallel import CommTimer, SequenceMesh
from opensora_sp.planner.seconds import ModelFlops
from opensora_sp.runtime.cost_models import SHEETS, gpu_of

from .checkpointing import RESUME
from .metrics import Reporter
from .step import StepResult
from .trainable import learning_rate

logger = logging.getLogger(__name__)


class Meter:
    """Measures what happens while ``timer`` is entered, between two calls of ``measure``.

    Args:
        peak_tflops: of one device; None where it is not known.

    Attributes:
        by_rank: of the last call of ``measure``, numbers that differ between ranks, by rank.
    """

    def __init__(
        self,
        model: ConditionedModel,
        device: torch.device,
        *,
        mesh: SequenceMesh,
        peak_tflops: float | None,
    ) -> None:
        self.device, self.mesh, self.peak_tflops = device, mesh, peak_tflops
        self.flops = ModelFlops.of(model)
        self.null_caption = len(model.y_embedder.y_embedding)
        self.timer = CommTimer(device)
        self.by_rank: dict[str, list[float]] = {}
        self._work = 0.0
        # In ascending order.
        self._step_times: list[float] = []

    def count(self, batch: Batch) -> None:
        """Add this rank's FLOPs of a micro-batch, without waiting for the device."""
        text = text_tokens(batch.text_lengths, batch.inputs["drop_caption"], self.null_caption)
        self._work += self.flops.step(tuple(batch.x_t.shape), text) / self.mesh.sp_size

    def measure(self, waited: float, *, steps: int, seconds: float, left: int) -> dict[str, float]:
        """Metrics of all ranks over ``steps`` steps that took ``seconds``. One collective.

        Args:
            waited: seconds that this rank waited for data.
            left: optimizer steps to the end of the run.

        Returns:
            "step_time" in seconds; "mfu" where the peak is known; as fractions of a step's time,
            "data_wait" of the rank that waited longest (the others wait for it) and, of several
            ranks, "communication", the mean; "peak_memory_gb" of the rank with the largest peak, in
            1e9 bytes; "eta" in seconds, by the median step so far.
        """
        world_size = dist.get_world_size()
        communicated = self.timer.take()
        # Fractions of this rank's time: ranks may finish writing a checkpoint at different times.
        shares = [waited / seconds, communicated / seconds]
        numbers = [self._work, *shares, peak_memory(self.device)]
        local = to_device(torch.tensor(numbers, dtype=torch.float64), self.device)
        # Gathered rather than reduced: metrics need sums, means and maxima, and ranks.jsonl each
        # number.
        ranks = [torch.empty_like(local) for _ in range(world_size)]
        dist.all_gather(ranks, local)
        work, data_wait, communication, memory = torch.stack(ranks, dim=1).tolist()
        self._work = 0.0
        self.by_rank = {
            "data_wait": data_wait,
            "communication": communication,
            "peak_memory_gb": [num_bytes / 1e9 for num_bytes in memory],
        }

        # A median, since a step with a compilation or a slow read says nothing of the rest.
        insort(self._step_times, seconds / steps)
        metrics = {
            "step_time": seconds / steps,
            "data_wait": max(data_wait),
            "peak_memory_gb": max(memory) / 1e9,
            "eta": left * self._step_times[len(self._step_times) // 2],
        }
        if world_size > 1:
            metrics["communication"] = statistics.fmean(communication)
        if self.peak_tflops is not None:
            at_peak = self.peak_tflops * 1e12 * world_size * seconds
            metrics["mfu"] = sum(work) / at_peak
        return metrics


def text_tokens(lengths: Sequence[int], drop: Tensor | None, null_caption: int) -> int:
    """Text tokens of all samples together, as ``CaptionEmbedder.pack`` packs them.

    Args:
        lengths: tokens of each caption, B of them.
        drop: bool ``[B]`` on the CPU, True for samples that get the null caption of
            ``null_caption`` tokens instead.
    """
    # An empty caption is one token, since attention needs a key.
    tokens = torch.tensor(lengths).clamp(min=1)
    if drop is not None:
        tokens = torch.where(drop, null_caption, tokens)
    return int(tokens.sum())


def known_peak(device: torch.device, precision: str) -> float | None:
    """Peak TFLOP/s of a GPU in 16 bits by its data sheet; None where that is not known."""
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return None
    gpu = gpu_of(torch.cuda.get_device_name(device))
    return None if gpu is None else SHEETS[gpu].tflops


def peak_memory(device: torch.device) -> int:
    """Peak bytes of torch's tensors on a GPU, else of this process on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024


@dataclass
class Interval:
    """Totals since the last line of the log."""

    start: float
    tokens: int = 0  # of all replicas
    steps: int = 0
    losses: list[float] = field(default_factory=list)  # of the steps that were taken


@dataclass
class StepLog:
    """Counts the steps of a run, and logs the numbers of each interval.

    Attributes:
        skipped: steps of the run whose loss or gradient was not finite.
        skipped_in_a_row: skipped steps since the last one that was taken.
    """

    cfg: TrainConfig
    meter: Meter
    work: Work
    loader: StepLoader
    corrupt: CorruptSamples
    optimizer: Any
    skipped: int = 0
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.begin_interval()

    def begin_interval(self) -> None:
        """Begin with no steps now."""
        self._interval = Interval(time.perf_counter())

    def exclude(self, seconds: float) -> None:
        """Leave out time that is not part of a step."""
        self._interval.start += seconds

    def see(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Count the micro-batches of a step, of all replicas."""
        for micro_batch in micro_batches:
            tokens = self.work.tokens(micro_batch.shape)
            self._interval.tokens += len(micro_batch.ids) * tokens

    def count(self, result: StepResult) -> None:
        """Count a step; raises ValueError after ``max_bad_steps`` skipped steps in a row."""
        self._interval.steps += 1
        if result.taken:
            self._interval.losses.append(result.loss)
            self.skipped_in_a_row = 0
            return

        self.skipped += 1
        self.skipped_in_a_row += 1
        # Results are equal on all ranks: one line is enough.
        if self.meter.mesh.rank == 0:
            message = "step %d skipped: the loss (%g) or a gradient is not finite"
            logger.warning(message, result.step, result.loss)
        # A single one is normal with fp16, and a damaged clip passes; weights that diverged do not
        # recover.
        if self.skipped_in_a_row >= self.cfg.max_bad_steps:
            raise ValueError(
                f"got no finite loss and gradient in {self.skipped_in_a_row} steps in a row, up to "
                f"step {result.step} (max_bad_steps); expected numbers; lower optimizer.lr or set "
                f"grad_clip, and {RESUME}"
            )

    def write(self, reporter: Reporter, done: int) -> None:
        """Log the numbers of the interval that ends here, and begin the next one. Collective."""
        numbers = self._measure(done)
        reporter.log(done, numbers, self.meter.peak_tflops, self.meter.by_rank)
        self.begin_interval()

    def _measure(self, done: int) -> dict[str, float | None]:
        """The numbers of the interval, by their names in ``metrics.jsonl``. Collective."""
        losses = self._interval.losses
        substituted = self.corrupt.report(self.meter.device)
        grad_norm = self.optimizer.get_grad_norm()
        # After the calls that wait for the device.
        seconds = time.perf_counter() - self._interval.start
        measured = self.meter.measure(
            self.loader.take_waited(),
            steps=self._interval.steps,
            seconds=seconds,
            left=self.cfg.max_steps - done,
        )

        return {
            "loss": sum(losses) / len(losses) if losses else None,
            "grad_norm": 0.0 if grad_norm is None else float(grad_norm),
            "lr": learning_rate(self.cfg, done - 1),
            "tokens_per_s": self._interval.tokens / seconds,
            "replaced_clips": substituted,
            "skipped_steps": self.skipped,
            **measured,
        }
