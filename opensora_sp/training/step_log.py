"""The log of a run: results of optimizer steps, and the numbers of each interval of the log."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opensora_sp.config import TrainConfig
from opensora_sp.config.learning_rate import learning_rate
from opensora_sp.data import Assigned, MicroBatch, ScheduledBatches, StepLoader
from opensora_sp.data.sampler import RankBatches, snake_order
from opensora_sp.data.schedule import Seconds
from opensora_sp.features.build import Work
from opensora_sp.features.corrupt_samples import CorruptSamples
from opensora_sp.parallel import SequenceMesh
from opensora_sp.parallel.rank_groups import RankGroup

from .checkpointing import Checkpoints
from .meter import Meter
from .metrics import Reporter
from .step import StepResult

logger = logging.getLogger(__name__)
# Seconds that torchrun gives its ranks after Ctrl-C or SIGTERM; a constant of torch.
LAUNCHER_GRACE_TIME = 30.0


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
    rank_batches: RankBatches
    corrupt: CorruptSamples
    optimizer: Any
    checkpoints: Checkpoints
    skipped: int = 0
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.bucket_shares = BucketShares(self.meter.mesh, self.rank_batches)
        self._has_warned_of_grace_time = False
        self.begin_interval()

    def begin_interval(self) -> None:
        """Begin with no steps now."""
        self._interval = Interval(time.perf_counter())

    def exclude(self, seconds: float) -> None:
        """Leave out time that is not part of a step."""
        self._interval.start += seconds

    def see(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Count the micro-batches of a step, of all replicas."""
        for micro_batch in micro_batches:
            tokens = self.work.tokens(micro_batch.shape)
            self._interval.tokens += len(micro_batch.ids) * tokens
        self.bucket_shares.see(step, micro_batches)

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
        if self.skipped_in_a_row >= self.cfg.max_bad_steps:
            raise ValueError(
                f"got no finite loss and gradient in {self.skipped_in_a_row} steps in a row, up to "
                f"step {result.step} (max_bad_steps); expected numbers; lower optimizer.lr or set "
                f"grad_clip, and {self.checkpoints.advice()}"
            )

    def write(self, reporter: Reporter, done: int) -> None:
        """Log the numbers of the interval that ends here, and begin the next one. Collective."""
        numbers = self._measure(done)
        reporter.log(done, numbers, self.meter.peak.tflops, self.meter.by_rank)
        advice = advice_for_long_steps(numbers["step_time"] or 0.0, self.cfg.grace_time)
        if advice is not None and not self._has_warned_of_grace_time:
            logger.warning("%s", advice)
            self._has_warned_of_grace_time = True
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
            **self.bucket_shares.take(),
        }


def advice_for_long_steps(seconds_per_step: float, grace_time: float) -> str | None:
    """How to stop a run whose steps take longer than the launcher waits; None for shorter steps.

    A run ends with the step after the one in which it was asked to stop, at the latest.

    Args:
        grace_time: of the config; a rank that was signalled alone has so many seconds to end.
    """
    seconds = 2 * seconds_per_step
    if seconds < LAUNCHER_GRACE_TIME or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    is_too_short = seconds >= grace_time
    raising = f", and raise grace_time (now {grace_time:g} s)" if is_too_short else ""
    return (
        f"two steps take {seconds:.0f} s, and torchrun kills ranks {LAUNCHER_GRACE_TIME:.0f} s "
        "after Ctrl-C or SIGTERM, without a checkpoint of these steps; "
        "to stop with one, send SIGINT to this rank alone: "
        f"kill -INT {os.getpid()}{raising}"
    )


class BucketShares:
    """Predicted times that steps spend on each bucket, equal on all ranks.

    All ranks know which of them computes what, so nothing is communicated.
    """

    def __init__(self, mesh: SequenceMesh, rank_batches: RankBatches) -> None:
        self.mesh, self.rank_batches = mesh, rank_batches
        self._reset()

    def _reset(self) -> None:
        self._total = 0.0
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._idle: defaultdict[str, float] = defaultdict(float)
        self._ranks: Counter[str] = Counter()
        self._micro_batches: Counter[str] = Counter()

    def see(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Count the micro-batches of a step, if they are of buckets or scheduled on groups."""
        if isinstance(self.rank_batches, ScheduledBatches):
            assigned = self.rank_batches.assigned(step)
            self._count(assigned, self.rank_batches.seconds)
        elif micro_batches[0].bucket:
            for assigned in rounds_of(micro_batches, self.mesh.family):
                self._count(assigned, lambda micro_batch, group: micro_batch.cost)

    def _count(self, assigned: Sequence[Assigned], seconds: Seconds) -> None:
        """Add micro-batches after which all ranks wait for the slowest one.

        A rank that is done earlier waits after its last micro-batch, and that one's bucket counts
        the time.
        """
        busy = np.zeros(self.mesh.world_size)
        last = [""] * self.mesh.world_size
        for micro_batch, group in assigned:
            bucket, taken = name_of(micro_batch), seconds(micro_batch, group)
            busy[group.start : group.stop] += taken
            last[group.start : group.stop] = [bucket] * group.size
            self._busy[bucket] += taken * group.size
            self._ranks[bucket] += group.size
            self._micro_batches[bucket] += 1

        for bucket, idle in zip(last, busy.max() - busy, strict=True):
            self._idle[bucket] += idle
        self._total += self.mesh.world_size * busy.max()

    def take(self) -> dict[str, float]:
        """The numbers since the last call, for each bucket, by their names in ``metrics.jsonl``.

        "share" is a bucket's part of the time in which ranks compute, "degree" the mean number of
        ranks of a micro-batch, and "idle" the part of all time that ranks wait after one.
        """
        computed = sum(self._busy.values())
        numbers: dict[str, float] = {}
        for bucket, busy in sorted(self._busy.items(), key=lambda entry: -entry[1]):
            numbers[f"share/{bucket}"] = busy / computed
            numbers[f"degree/{bucket}"] = self._ranks[bucket] / self._micro_batches[bucket]
            numbers[f"idle/{bucket}"] = self._idle[bucket] / self._total
        self._reset()
        return numbers


def name_of(micro_batch: MicroBatch) -> str:
    """The bucket of a micro-batch; without buckets its frames and size."""
    frames, height, width = micro_batch.shape
    return micro_batch.bucket or f"{frames} x {height}x{width}"


def rounds_of(
    micro_batches: Sequence[MicroBatch], replicas: Sequence[RankGroup]
) -> list[list[Assigned]]:
    """The rounds of a step on replicas of a fixed degree, which wait for each other in each."""
    costs = [micro_batch.cost for micro_batch in micro_batches]
    indices = snake_order(costs, len(replicas))
    rounds: list[list[Assigned]] = [[] for _ in indices[0]]
    for group, indices_of_group in zip(replicas, indices, strict=True):
        for number, index in enumerate(indices_of_group):
            if index is not None:
                rounds[number].append(Assigned(micro_batches[index], group))
    return rounds
